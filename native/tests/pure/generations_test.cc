// generations_test.cc: runs of generations against an array that holds every imm, and slices that are short, lost, repeated and forged.
#include "engine/counters/generations.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "base/bytes.h"

namespace asyncfabric {
namespace {

constexpr uint32_t kEnd = Generations::kEnd;

Generations reported(const Generations& from, size_t most_bytes, uint32_t* slices) {
  Generations out;
  *slices = 0;
  for (uint32_t at = 0; at != kEnd;) {
    const std::string slice = from.slice(at, most_bytes);
    EXPECT_LE(slice.size(), most_bytes);
    const uint32_t next = out.learn(at, slice);
    if (next <= at) {
      ADD_FAILURE() << "no way on from " << at;
      break;
    }
    EXPECT_EQ(out.learn(next, slice), next) << "a slice that is sent again changes nothing";
    at = next;
    ++*slices;
  }
  return out;
}

TEST(Generations, AreThoseThatWereSetWhateverTheOrder) {
  std::mt19937 random(1);
  for (int round = 0; round < 8; ++round) {
    Generations runs;
    std::vector<uint8_t> all(kEnd, 0);
    std::vector<uint32_t> set;
    const uint32_t room = round % 2 == 0 ? 200 : kEnd;  // close together, so that runs meet, and at the ends
    const uint32_t base = round % 4 == 0 ? kEnd - room : 0;
    for (int i = 0; i < 400; ++i) {
      const uint32_t imm = base + static_cast<uint32_t>(random()) % room,
                     generation = static_cast<uint32_t>(random()) & 3;
      runs.set(imm, generation);
      set.push_back(imm);
      all[imm] = static_cast<uint8_t>(generation);
    }
    // Each that was set with its neighbours, and a sample of the rest.
    std::vector<uint32_t> looked_at{0, kEnd - 1};
    for (uint32_t imm = 0; imm < kEnd; ++imm)
      if (imm % 97 == 0 || (imm >= base && imm - base < 200 && room == 200)) looked_at.push_back(imm);
    for (const uint32_t imm : set)
      for (const uint32_t near : {imm - 1, imm, imm + 1})
        if (near < kEnd) looked_at.push_back(near);
    for (const size_t most : {size_t{16}, size_t{60}, size_t{8192}}) {
      uint32_t slices = 0;
      const Generations learned = reported(runs, most, &slices);
      const auto same = [&](uint32_t imm) { return runs.of(imm) == all[imm] && learned.of(imm) == all[imm]; };
      for (const uint32_t imm : looked_at) ASSERT_TRUE(same(imm)) << imm;
    }
  }
}

TEST(Generations, ACircleOfCountersIsOneSlice) {
  Generations runs;
  std::mt19937 random(2);
  for (uint32_t imm = 1u << 19; imm < kEnd; ++imm)
    if (random() % 4096 != 0) runs.set(imm, 1);  // the others have been open all the time
  for (uint32_t imm = 1u << 19; imm < 700'000; ++imm)
    if (runs.of(imm) != 0) runs.set(imm, 2);
  uint32_t slices = 0;
  const Generations learned = reported(runs, 8192, &slices);
  EXPECT_EQ(slices, 1u);
  EXPECT_EQ(learned.of(1u << 19), 2u);
  EXPECT_EQ(learned.of(kMaxImm), 1u);
}

TEST(Generations, SlicesThatAreNoneAreRefused) {
  const auto slice = [](uint32_t from, uint32_t next, std::initializer_list<uint32_t> words) {
    ByteWriter writer;
    writer.put(from);
    writer.put(next);
    for (const uint32_t word : words) writer.put(word);
    return writer.text();
  };
  const uint32_t one = 10u << 2 | 1;
  Generations runs;
  for (const std::string& bad :
       {std::string(), slice(0, kEnd, {}).substr(0, 7), slice(0, 0, {}), slice(0, kEnd + 1, {}), slice(5, kEnd, {}),
        slice(0, kEnd, {one}), slice(0, kEnd, {one, 9}), slice(0, 10, {one, 10}), slice(0, kEnd, {one, kEnd}),
        slice(0, kEnd, {~0u, ~0u}), slice(0, kEnd, {one, 20, 15u << 2 | 1, 30})})
    EXPECT_EQ(runs.learn(0, bad), 0u) << bad.size();
  EXPECT_TRUE(runs.all_zero()) << "a refused slice changes nothing, also where its first runs are right";
  EXPECT_EQ(runs.learn(0, slice(0, 40, {one, 20})), 40u);
  EXPECT_EQ(runs.of(20), 1u);
  EXPECT_EQ(runs.of(21), 0u);
}

}  // namespace
}  // namespace asyncfabric
