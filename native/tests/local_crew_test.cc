// local_crew_test.cc: threads that copy together: every byte, once, whatever the pieces are, whoever sleeps.
#include "providers/local/crew.h"

#include <gtest/gtest.h>

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

TEST(LocalCrew, CopiesExactlyItsPieces) {
  const Copier copier(CopyMode::kAuto);
  std::mt19937_64 random(11);
  Memory memory;
  for (const uint32_t helpers : {0u, 1u, 3u}) {
    Crew crew(copier, helpers);
    for (const auto& [count, most] :
         {std::pair<size_t, size_t>{1, kBytes}, {2, kBytes / 2}, {7, 400'000}, {256, 4096}, {1024, 3000}, {1023, 1}}) {
      for (int round = 0; round < 4; ++round) {
        std::fill(memory.target.begin(), memory.target.end(), kPoison);
        const auto made = memory.pieces(random, count, most);
        crew.copy(made);
        memory.expect_copied(made);
      }
    }
  }
}

// The caller reuses both memories at once: nobody may still be reading or writing for an earlier call.
TEST(LocalCrew, NobodyWorksOnAnEarlierCall) {
  const Copier copier(CopyMode::kAuto);
  Crew crew(copier, 3);
  constexpr size_t kLength = 192 << 10;
  std::vector<uint8_t> source(kLength), target(kLength);
  for (int call = 0; call < 3000; ++call) {
    std::memset(source.data(), call, kLength);
    const Piece piece{target.data(), source.data(), kLength};
    crew.copy({&piece, 1});
    for (size_t at = 0; at < kLength; at += 4096) ASSERT_EQ(target[at], static_cast<uint8_t>(call)) << call;
    ASSERT_EQ(target.back(), static_cast<uint8_t>(call));
    if (call % 500 == 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));  // long enough for all to fall asleep
  }
}

TEST(LocalCrew, EndsWithoutACallAndRightAfterOne) {
  const Copier copier(CopyMode::kAuto);
  std::vector<uint8_t> source(1 << 20, 3), target(1 << 20);
  for (int round = 0; round < 50; ++round) {
    Crew crew(copier, 2);
    const Piece piece{target.data(), source.data(), source.size()};
    if (round % 2 == 0) crew.copy({&piece, 1});
  }
  EXPECT_EQ(target, source);
}

}  // namespace
}  // namespace asyncfabric::local
