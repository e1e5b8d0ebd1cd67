// rows_sharing_test.cc: row loops that several threads share: the bits are those of one thread, whoever calls at the same time.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "asyncfabric/rows.h"

namespace asyncfabric::rows {
namespace {

// Loops over random rows, long enough to be shared.
class Shared : public ::testing::Test {
 protected:
  static constexpr size_t kWidth = 1024, kTokens = 400;

  Shared() : from_(kTokens * kWidth), index_(kTokens), offsets_(kTokens + 1) {
    std::mt19937 random(5);
    for (uint8_t& byte : from_) byte = static_cast<uint8_t>(random());
    for (int64_t& each : index_) each = random() % kTokens;
    for (size_t row = 0; row < kTokens; ++row) offsets_[row + 1] = offsets_[row] + random() % 4;
    position_.resize(static_cast<size_t>(offsets_.back()));
    std::iota(position_.begin(), position_.end(), 0);
    std::shuffle(position_.begin(), position_.end(), random);
    for (int64_t& each : position_) each %= kTokens;
    weights_.assign(position_.size(), 0.5F);
    for (int64_t token = 0; token < static_cast<int64_t>(kTokens); ++token)
      for (size_t part = 0; part < 3; ++part)
        if (random() % 2 == 0) listed_[part].push_back(token);
  }
  ~Shared() override { use_threads(0); }

  // The bytes of all loops, one behind the other.
  std::vector<uint8_t> all_of() {
    const Source source{from_.data(), kTokens, kWidth};
    std::vector<uint8_t> found;
    const auto keep = [&](bool fine, const std::vector<uint8_t>& bytes) {
      EXPECT_TRUE(fine);
      found.insert(found.end(), bytes.begin(), bytes.end());
    };
    std::vector<uint8_t> into(kTokens * kWidth), wide(position_.size() * kWidth);
    keep(take_rows(source, index_, {into.data(), kTokens, kWidth}), into);
    std::vector<int64_t> places(position_.size());
    std::iota(places.rbegin(), places.rend(), 0);
    keep(spread_rows(source, offsets_, places, {wide.data(), places.size(), kWidth}), wide);
    std::vector<int64_t> tokens;
    std::vector<Part> parts;
    for (const auto& part : listed_) {
      const auto begin = static_cast<int64_t>(tokens.size());
      tokens.insert(tokens.end(), part.begin(), part.end());
      parts.push_back({begin, static_cast<int64_t>(tokens.size()), begin % 7});
    }
    for (const RowKind kind : {RowKind::kBfloat16, RowKind::kFloat32}) {
      keep(weigh_rows(source, kind, offsets_, position_, weights_, {into.data(), kTokens, kWidth}), into);
      const Source many{wide.data(), places.size(), kWidth};
      keep(add_rows(many, kind, tokens, parts, {into.data(), kTokens, kWidth}), into);
      std::vector<float> sums(kTokens * kWidth / (kind == RowKind::kFloat32 ? 4 : 2), 0.25F);
      EXPECT_TRUE(gather_sums(many, kind, tokens, parts, sums));
      const auto* bytes = reinterpret_cast<const uint8_t*>(sums.data());
      found.insert(found.end(), bytes, bytes + 4 * sums.size());
    }
    return found;
  }

  std::vector<uint8_t> from_;
  std::vector<int64_t> index_, offsets_, position_, listed_[3];
  std::vector<float> weights_;
};

TEST_F(Shared, AnyNumberOfThreadsMakesTheSameBits) {
  use_threads(1);
  const std::vector<uint8_t> wanted = all_of();
  for (const uint32_t threads : {2U, 4U}) {
    use_threads(threads);
    for (int round = 0; round < 4; ++round) ASSERT_EQ(all_of(), wanted) << threads << " threads";
  }
}

TEST_F(Shared, LoopsOfSeveralThreadsAtOnceAreRight) {
  use_threads(3);
  const std::vector<uint8_t> wanted = all_of();
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int caller = 0; caller < 3; ++caller)
    callers.emplace_back([&] {
      for (int round = 0; round < 3; ++round) wrong += all_of() != wanted;
    });
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace asyncfabric::rows
