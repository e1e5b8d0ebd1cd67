// rows_sharing_test.cc: row loops that several threads share: the bits are those of one thread, whoever calls at the same time.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "asyncfabric/rows.h"
#include "rigs/row_parts.h"
#include "rows/sharing.h"

namespace asyncfabric::rows {
namespace {

// Loops over random rows, long enough to be shared.
class Shared : public ::testing::Test {
 protected:
  static constexpr size_t kWidth = 1024, kTokens = 512;

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

  // The bytes of all loops, one behind the other; `cuts`: where their rows are cut into parts.
  std::vector<uint8_t> all_of(std::span<const int64_t> cuts = {}) {
    const Source source{from_.data(), kTokens, kWidth};
    std::vector<uint8_t> found;
    const auto keep = [&](bool fine, const std::vector<uint8_t>& bytes) {
      EXPECT_TRUE(fine);
      found.insert(found.end(), bytes.begin(), bytes.end());
    };
    std::vector<uint8_t> into(kTokens * kWidth), wide(position_.size() * kWidth);
    keep(take_rows(source, index_, going_to({into.data(), kTokens, kWidth}, cuts)), into);
    std::vector<int64_t> places(position_.size());
    std::iota(places.rbegin(), places.rend(), 0);
    keep(spread_rows(coming_from(source, cuts), offsets_, places, {wide.data(), places.size(), kWidth}), wide);
    std::vector<int64_t> tokens;
    std::vector<Part> parts;
    for (const auto& part : listed_) {
      const auto begin = static_cast<int64_t>(tokens.size());
      tokens.insert(tokens.end(), part.begin(), part.end());
      parts.push_back({begin, static_cast<int64_t>(tokens.size()), begin % 7});
    }
    for (const RowKind kind : {RowKind::kBfloat16, RowKind::kFloat32}) {
      keep(weigh_rows(source, kind, offsets_, position_, weights_, going_to({into.data(), kTokens, kWidth}, cuts)),
           into);
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

TEST_F(Shared, AnyPartsOfTheRowsMakeTheSameBits) {
  use_threads(1);
  const std::vector<uint8_t> wanted = all_of();
  std::mt19937 random(9);
  for (const uint32_t threads : {1U, 3U}) {
    use_threads(threads);
    for (int round = 0; round < 4; ++round) {
      std::vector<int64_t> cuts(random() % 9);
      for (int64_t& cut : cuts) cut = random() % (kTokens + 1);
      std::sort(cuts.begin(), cuts.end());
      ASSERT_EQ(all_of(cuts), wanted) << threads << " threads, " << cuts.size() << " cuts";
    }
  }
}

TEST_F(Shared, EachRowOfAllPartsIsDoneOnce) {
  constexpr size_t kRowBytes = 64 << 10;  // a share for each row
  const std::vector<GoingRows> parts{{0, 3, {}}, {3, 3, {}}, {10, 12, {}}, {5, 6, {}}, {20, 45, {}}, {7, 7, {}}};
  for (const uint32_t threads : {1U, 3U}) {
    use_threads(threads);
    for (const size_t row_bytes : {size_t{1}, kRowBytes / 3, kRowBytes}) {
      std::vector<std::atomic<int>> done(45);
      share_parts(std::span(parts), row_bytes, [&](const GoingRows& part, size_t first, size_t end) {
        EXPECT_LE(end, length_of(part));
        for (size_t row = first; row < end; ++row) ++done[static_cast<size_t>(part.begin) + row];
      });
      for (size_t row = 0; row < done.size(); ++row) {
        const bool wanted = row < 3 || row == 5 || row == 10 || row == 11 || row >= 20;
        EXPECT_EQ(done[row], wanted ? 1 : 0) << row << ", rows of " << row_bytes << " bytes";
      }
    }
  }
}

TEST_F(Shared, PickedRowsAreSpreadAsIfTheyWereTaken) {
  use_threads(3);
  const Source source{from_.data(), kTokens, kWidth};
  std::vector<uint8_t> taken(kTokens * kWidth), wanted(position_.size() * kWidth), found = wanted;
  ASSERT_TRUE(take_rows(source, index_, going_to({taken.data(), kTokens, kWidth})));
  std::vector<int64_t> places(position_.size());
  std::iota(places.rbegin(), places.rend(), 0);
  const Source rows{taken.data(), kTokens, kWidth};
  ASSERT_TRUE(spread_rows(coming_from(rows), offsets_, places, {wanted.data(), places.size(), kWidth}));
  const std::vector<int64_t> cuts{0, 200, 450};
  std::vector<ComingRows> parts = coming_from(rows, cuts);
  parts[2].source = source;
  parts[2].picks = true;
  parts[2].picked = std::span(index_).subspan(200, 250);
  ASSERT_TRUE(spread_rows(parts, offsets_, places, {found.data(), places.size(), kWidth}));
  EXPECT_EQ(found, wanted);
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
