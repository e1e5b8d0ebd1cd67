// local_copy_pool_test.cc: threads that copy together: every byte, once, whatever the pieces are, whoever sleeps.
#include "providers/local/transfers/copy_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

namespace asyncfabric::local {
namespace {

constexpr size_t kBytes = 3 << 20;
constexpr uint8_t kPoison = 0xa5;

struct Memory {
  Memory() : source(kBytes), target(kBytes, kPoison) {
    std::mt19937_64 random(7);
    for (uint8_t& byte : source) byte = static_cast<uint8_t>(random());
  }
  std::vector<uint8_t> source, target;

  // Pieces of random lengths with gaps between them, in a random order of their own.
  std::vector<Piece> pieces(std::mt19937_64& random, size_t count, size_t most) {
    std::vector<Piece> made;
    size_t at = 0;
    while (made.size() < count) {
      const size_t length = random() % most + 1;
      at += random() % 3;
      if (at + length > kBytes) break;
      made.push_back({target.data() + at, source.data() + at, length});
      at += length;
    }
    std::shuffle(made.begin(), made.end(), random);
    return made;
  }

  void expect_copied(const std::vector<Piece>& made) {
    std::vector<uint8_t> wanted(kBytes, kPoison);
    for (const Piece& piece : made) std::memcpy(wanted.data() + (piece.to - target.data()), piece.from, piece.length);
    ASSERT_EQ(target, wanted);
  }
};

TEST(LocalCopyPool, CopiesExactlyItsPieces) {
  const Copier copier(CopyMode::kAuto);
  std::mt19937_64 random(11);
  Memory memory;
  for (const uint32_t helpers : {0u, 1u, 3u}) {
    CopyPool pool(copier, helpers);
    for (const auto& [count, most] :
         {std::pair<size_t, size_t>{1, kBytes}, {2, kBytes / 2}, {7, 400'000}, {256, 4096}, {1024, 3000}, {1023, 1}}) {
      for (int round = 0; round < 4; ++round) {
        std::fill(memory.target.begin(), memory.target.end(), kPoison);
        const auto made = memory.pieces(random, count, most);
        pool.copy(made);
        memory.expect_copied(made);
      }
    }
  }
}

// The caller reuses both memories at once: nobody may still be reading or writing for an earlier call.
TEST(LocalCopyPool, NobodyWorksOnAnEarlierCall) {
  const Copier copier(CopyMode::kAuto);
  CopyPool pool(copier, 3);
  constexpr size_t kLength = 192 << 10;
  std::vector<uint8_t> source(kLength), target(kLength);
  for (int call = 0; call < 3000; ++call) {
    std::memset(source.data(), call, kLength);
    const Piece piece{target.data(), source.data(), kLength};
    pool.copy({&piece, 1});
    for (size_t at = 0; at < kLength; at += 4096) ASSERT_EQ(target[at], static_cast<uint8_t>(call)) << call;
    ASSERT_EQ(target.back(), static_cast<uint8_t>(call));
    if (call % 500 == 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));  // long enough for all to fall asleep
  }
}

// Bytes that name where they belong, and what their parts were.
class Pattern final : public Gatherer {
 public:
  explicit Pattern(uint64_t length) : copied_(length / kPartBytes + 1) {}
  bool copy(uint8_t*, uint64_t, uint64_t) override { return false; }
  bool begin_parts(uint64_t before, uint64_t length) override {
    before_ = before;
    length_ = length;
    for (auto& part : copied_) part.store(0, std::memory_order_relaxed);
    return willing;
  }
  void copy_part(uint8_t* to, uint64_t at, uint64_t length) override {
    misplaced += at % kPartBytes != 0 || length == 0 || at + length > length_;
    for (uint64_t byte = 0; byte < length; ++byte) to[byte] = value(before_ + at + byte);
    for (uint64_t part = at / kPartBytes; part * kPartBytes < at + length; ++part) ++copied_[part];
  }
  void end_parts() override { ++ended; }

  static uint8_t value(uint64_t at) { return static_cast<uint8_t>(at * 167 >> 5); }
  bool each_once(uint64_t length) const {
    for (uint64_t part = 0; part * kPartBytes < length; ++part)
      if (copied_[part] != 1) return false;
    return true;
  }

  bool willing = true;
  std::atomic<int> misplaced{0};
  int ended = 0;

 private:
  std::vector<std::atomic<int>> copied_;
  uint64_t before_ = 0, length_ = 0;
};

TEST(LocalCopyPool, GathersEachPartOnceAndCopiesPiecesBetweenThat) {
  const Copier copier(CopyMode::kAuto);
  for (const uint32_t helpers : {1u, 3u}) {
    CopyPool pool(copier, helpers);
    std::vector<uint8_t> target(1 << 20), source(1 << 20, 77), other(1 << 20);
    Pattern pattern(target.size());
    std::mt19937_64 random(12);
    for (int call = 0; call < 200; ++call) {
      const uint64_t length =
          CopyPool::kWorthBytes + 64 * (random() % ((target.size() - CopyPool::kWorthBytes) / 64 + 1));
      const uint64_t before = random() % 1000 * 64;
      ASSERT_TRUE(pool.gather(pattern, target.data(), before, length));
      ASSERT_EQ(pattern.ended, call + 1);
      ASSERT_TRUE(pattern.each_once(length)) << length;
      for (uint64_t at = 0; at < length; at += 61) ASSERT_EQ(target[at], Pattern::value(before + at));
      const Piece piece{other.data(), source.data(), other.size()};
      pool.copy({&piece, 1});
      ASSERT_EQ(other, source);
      std::fill(other.begin(), other.end(), uint8_t{0});
    }
    EXPECT_EQ(pattern.misplaced, 0);
    EXPECT_FALSE(pool.gather(pattern, target.data(), 0, CopyPool::kWorthBytes - 64)) << "not worth it";
    pattern.willing = false;
    EXPECT_FALSE(pool.gather(pattern, target.data(), 0, target.size()));
    EXPECT_EQ(pattern.ended, 200);
  }
}

TEST(LocalCopyPool, FewCoresCopyAloneAndManyLeaveSomeToOthers) {
  for (const auto& [cores, size] : {std::pair<int, uint32_t>{1, 1}, {2, 1}, {15, 1}, {16, 4}, {48, 4}, {256, 4}})
    EXPECT_EQ(WorkPool::size_for(cores), size) << cores;
}

TEST(LocalCopyPool, EndsWithoutACallAndRightAfterOne) {
  const Copier copier(CopyMode::kAuto);
  std::vector<uint8_t> source(1 << 20, 3), target(1 << 20);
  for (int round = 0; round < 50; ++round) {
    CopyPool pool(copier, 2);
    const Piece piece{target.data(), source.data(), source.size()};
    if (round % 2 == 0) pool.copy({&piece, 1});
  }
  EXPECT_EQ(target, source);
}

}  // namespace
}  // namespace asyncfabric::local
