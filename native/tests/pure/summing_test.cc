// summing_test.cc: sums of many boxes are those of the same bytes put in order, however runs cut stripes; what is refused.
#include "asyncfabric/summing.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "all_kernels.h"

namespace asyncfabric::rows {
namespace {

using Ints = std::vector<int64_t>;

struct Columns {
  Ints stretches{0}, at, run_bytes, dimensions{0}, sizes, strides;

  void stretch(int64_t begin, int64_t run, const Ints& outer, const Ints& steps) {
    at.push_back(begin);
    run_bytes.push_back(run);
    sizes.insert(sizes.end(), outer.begin(), outer.end());
    strides.insert(strides.end(), steps.begin(), steps.end());
    dimensions.push_back(static_cast<int64_t>(sizes.size()));
  }
  void end_box() { stretches.push_back(static_cast<int64_t>(at.size())); }
  BoxTable table() const { return {stretches, at, run_bytes, dimensions, sizes, strides}; }
};

std::vector<uint8_t> noise(size_t length) {
  std::mt19937_64 random(3);
  std::vector<uint8_t> bytes(length);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

TEST(Summing, SumsAreThoseOfBoxesPutInOrder) {
  const std::vector<uint8_t> memory = noise(1 << 16);
  std::mt19937_64 random(4);
  const auto draw = [&](int64_t least, int64_t most) { return std::uniform_int_distribution(least, most)(random); };
  for (int round = 0; round < 300; ++round) {
    Columns columns;
    std::vector<std::vector<uint8_t>> wanted;
    for (int64_t box = draw(1, 4); box > 0; --box) {
      std::vector<uint8_t> bytes;
      while (bytes.size() < kLeastSummedBytes) {
        const int64_t run = draw(1, 200), outer = draw(1, 9), step = run + draw(0, 70), begin = draw(0, 4000);
        columns.stretch(begin, run, {outer}, {step});
        for (int64_t i = 0; i < outer; ++i)
          bytes.insert(bytes.end(), memory.begin() + begin + i * step, memory.begin() + begin + i * step + run);
      }
      columns.end_box();
      wanted.push_back(bytes);
    }
    const BoxTable table = columns.table();
    size_t reach = 0;
    ASSERT_TRUE(table.measure(&reach));
    ASSERT_LE(reach, memory.size());
    const auto last = static_cast<int64_t>(wanted.size()) - 1;
    const Ints numbers{last, 0, last};
    std::vector<uint64_t> sums(numbers.size());
    ASSERT_TRUE(sum_boxes(memory.data(), table, numbers, sums));
    for (size_t place = 0; place < numbers.size(); ++place) {
      const std::vector<uint8_t>& bytes = wanted[static_cast<size_t>(numbers[place])];
      std::vector<uint8_t> target(bytes.size());
      uint64_t sum = 0;
      ASSERT_TRUE(order_and_sum({bytes.data(), {}, {}, bytes.size()}, target, false, &sum));
      EXPECT_EQ(sums[place], sum) << "of " << bytes.size() << " bytes";
    }
  }
}

// The last byte of the memory is the last that is read, and nothing before the first one: the sanitizer looks.
TEST(Summing, NothingOutsideOfABoxIsRead) {
  for (const int64_t run : {64, 100, 241, 1024}) {
    const std::vector<uint8_t> memory = noise(static_cast<size_t>(5 * run));
    Columns columns;
    columns.stretch(0, run, {5}, {run});
    columns.end_box();
    size_t reach = 0;
    ASSERT_TRUE(columns.table().measure(&reach));
    EXPECT_EQ(reach, memory.size());
    std::vector<uint64_t> sums(1);
    EXPECT_TRUE(sum_boxes(memory.data(), columns.table(), Ints{0}, sums));
  }
}

TEST(Summing, WhatDoesNotFitIsRefused) {
  const std::vector<uint8_t> memory = noise(4096);
  Columns columns;
  columns.stretch(8, 300, {}, {});
  columns.end_box();
  std::vector<uint64_t> sums(1);
  EXPECT_TRUE(sum_boxes(memory.data(), columns.table(), Ints{0}, sums));
  for (const Ints& numbers : {Ints{1}, Ints{-1}, Ints{0, 0}, Ints{}})
    EXPECT_FALSE(sum_boxes(memory.data(), columns.table(), numbers, sums));
  size_t reach = 0;
  const auto refused = [&](auto change) {
    Columns wrong = columns;
    change(wrong);
    return !wrong.table().measure(&reach);
  };
  EXPECT_TRUE(refused([](Columns& wrong) { wrong.stretches = {}; }));
  EXPECT_TRUE(refused([](Columns& wrong) { wrong.stretches = {0, 2}; }));
  EXPECT_TRUE(refused([](Columns& wrong) { wrong.dimensions = {0}; }));
  EXPECT_TRUE(refused([](Columns& wrong) { wrong.at[0] = -1; }));
  EXPECT_TRUE(refused([](Columns& wrong) { wrong.run_bytes[0] = 240; }));
  EXPECT_TRUE(refused([](Columns& wrong) { wrong.run_bytes[0] = 0; }));
  EXPECT_TRUE(refused([](Columns& wrong) { wrong.stretch(0, 300, {-2}, {0}); }));
}

TEST(Summing, WordsAreSummedAlikeByAllLoops) {
  const std::vector<uint8_t> bytes = noise(4099);
  for (const size_t length : {0, 1, 3, 4, 7, 60, 64, 68, 4096, 4099}) {
    const std::span part(bytes.data(), length);
    const uint64_t wanted = sum_words(part, 0xfffffff0);
    for (const Kernels* kernels : all_kernels()) {
      const size_t count = length / 4;
      uint8_t last[4] = {};
      std::memcpy(last, part.data() + 4 * count, length % 4);
      uint64_t found = kernels->sum_words(part.data(), count, 0xfffffff0);
      if (length % 4 != 0) found += kernels->sum_words(last, 1, 0xfffffff0 + static_cast<uint32_t>(count));
      EXPECT_EQ(found, wanted) << kernels->name << ", " << length;
    }
  }
}

TEST(Summing, TheSumOfWordsHasItsFormula) {
  const uint8_t word[4] = {0x78, 0x56, 0x34, 0x12};
  uint32_t factor = (5 + 0x6a09e667u) * 0x9e3779b1u;
  factor = (factor ^ factor >> 15) * 0x85ebca77u;
  factor ^= factor >> 16;
  uint32_t mixed = (0x12345678u + 0x6a09e667u) * 0x9e3779b1u;
  mixed ^= mixed >> 15;
  EXPECT_EQ(sum_words(word, 5), (2 * static_cast<uint64_t>(factor) + 1) * mixed);
}

}  // namespace
}  // namespace asyncfabric::rows
