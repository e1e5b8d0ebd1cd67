// ordering_test.cc: runs put in order and summed in one pass: known sums, each instruction set, every shape, what is refused.
#include "asyncfabric/ordering.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <random>
#include <vector>

#include "all_kernels.h"
#include "rows/xxh3.h"

namespace asyncfabric::rows {
namespace {

using Bytes = std::vector<uint8_t>;

Bytes pattern(size_t length) {
  Bytes bytes(length);
  for (size_t at = 0; at < length; ++at) bytes[at] = static_cast<uint8_t>(at * 167 + at / 256 * 31 + 11);
  return bytes;
}

Bytes noise(size_t length, uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(length);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

uint64_t sum_of(const Bytes& bytes, Bytes* target, bool past = false) {
  const Runs runs{bytes.data(), {}, {}, bytes.size()};
  target->assign(bytes.size(), 0);
  uint64_t sum = 0;
  EXPECT_TRUE(order_and_sum(runs, *target, past, &sum));
  return sum;
}

// From the reference implementation (xxhash 0.8).
TEST(Ordering, SumsAreThoseOfXxh3) {
  constexpr std::pair<size_t, uint64_t> kKnown[] = {
      {241, 0x126c7b54581689cb},  {256, 0x526ae67fad40467e},  {257, 0x1426361b56a8eac0},  {1023, 0xe6f3e3b5f621d25a},
      {1024, 0x8ba0f3f0fd9658db}, {1025, 0x17bbe3d23a518a56}, {1088, 0x80616b27cfb89e4e}, {4096, 0x4bca07c81f11394a},
      {4097, 0x192b3e9b54d86a76}, {65536, 0x220f8b70593674c0}};
  for (const auto& [length, wanted] : kKnown) {
    Bytes target;
    EXPECT_EQ(sum_of(pattern(length), &target), wanted) << length;
    EXPECT_EQ(target, pattern(length));
  }
}

TEST(Ordering, EachInstructionSetAddsTheSame) {
  const Bytes data = noise(64 * 70, 1);
  for (const size_t first : {0, 1, 15}) {
    for (const size_t count : {0, 1, 15, 16, 17, 33, 70}) {
      xxh3::Lanes wanted;
      kPlainKernels.stripes(wanted.sums, data.data(), count, first, data.data());
      for (const Kernels* kernels : all_kernels()) {
        xxh3::Lanes only;
        kernels->stripes(only.sums, data.data(), count, first, data.data());
        EXPECT_EQ(std::memcmp(only.sums, wanted.sums, sizeof wanted.sums), 0) << kernels->name << " " << count;
        for (const bool past : {false, true}) {
          alignas(64) std::array<uint8_t, 64 * 72> target{};
          xxh3::Lanes copied;
          kernels->copy_stripes(copied.sums, data.data(), count, first, target.data() + 64, data.data(), past);
          EXPECT_EQ(std::memcmp(copied.sums, wanted.sums, sizeof wanted.sums), 0) << kernels->name << " " << count;
          EXPECT_EQ(std::memcmp(target.data() + 64, data.data(), 64 * count), 0) << kernels->name << " " << count;
          for (size_t at = 0; at < 64; ++at) ASSERT_EQ(target[at] | target[64 * (count + 1) + at], 0);
        }
      }
    }
  }
}

// The sums of each block on their own, begun and gone on with, then chained: what one pass makes of them.
TEST(Ordering, EachInstructionSetAddsBlocksOnTheirOwnAndChainsThem) {
  constexpr size_t kBlocks = 5, kStripes = 16 * kBlocks + 7;
  const Bytes data = noise(64 * kStripes, 2);
  xxh3::Lanes wanted;
  kPlainKernels.stripes(wanted.sums, data.data(), kStripes, 0, data.data());
  for (const Kernels* kernels : all_kernels()) {
    for (const bool past : {false, true}) {
      for (const size_t step : {1, 5, 16, 23, 87}) {
        alignas(64) std::array<uint8_t, 64 * kStripes> target{};
        std::vector<uint64_t> parts(8 * (kBlocks + 1) + 8, 0xa5a5a5a5);
        for (size_t at = 0; at < kStripes; at += step) {
          const size_t count = std::min(step, kStripes - at);
          kernels->copy_parts(parts.data() + at / 16 * 8, data.data() + 64 * at, count, at % 16,
                              target.data() + 64 * at, data.data(), past);
        }
        xxh3::Lanes chained;
        kernels->chain(chained.sums, parts.data(), kBlocks);
        for (size_t lane = 0; lane < 8; ++lane) chained.sums[lane] += parts[8 * kBlocks + lane];
        EXPECT_EQ(std::memcmp(chained.sums, wanted.sums, sizeof wanted.sums), 0) << kernels->name << " " << step;
        EXPECT_EQ(std::memcmp(target.data(), data.data(), target.size()), 0) << kernels->name << " " << step;
        EXPECT_EQ(parts[8 * (kBlocks + 1)], 0xa5a5a5a5) << "behind the last block";
      }
    }
  }
}

TEST(Ordering, RunsOfAnyShapeAreInOrder) {
  std::mt19937_64 random(3);
  const Bytes memory = noise(3 << 20, 4);
  for (int round = 0; round < 400; ++round) {
    const size_t run = round % 2 == 0 ? 64 * (random() % 140 + 1) : random() % 9000 + 1;
    std::vector<int64_t> sizes(random() % 4), strides(sizes.size());
    size_t bytes = run, reach = run;
    for (size_t dimension = sizes.size(); dimension-- > 0;) {
      sizes[dimension] = static_cast<int64_t>(random() % 5 + 1);
      strides[dimension] = static_cast<int64_t>(reach + random() % 500);  // apart; twice in the same place is fine too
      if (random() % 8 == 0) strides[dimension] = 0;
      reach += static_cast<size_t>(sizes[dimension] - 1) * static_cast<size_t>(strides[dimension]);
      bytes *= static_cast<size_t>(sizes[dimension]);
    }
    if (bytes < kLeastSummedBytes || reach + 77 > memory.size()) continue;
    Bytes wanted;
    for (size_t at = 0; at < bytes / run; ++at) {
      size_t left = at, from = 77;
      for (size_t dimension = sizes.size(); dimension-- > 0;) {
        from += left % static_cast<size_t>(sizes[dimension]) * static_cast<size_t>(strides[dimension]);
        left /= static_cast<size_t>(sizes[dimension]);
      }
      wanted.insert(wanted.end(), memory.begin() + static_cast<ptrdiff_t>(from),
                    memory.begin() + static_cast<ptrdiff_t>(from + run));
    }
    const Runs runs{memory.data() + 77, sizes, strides, run};
    size_t reported_bytes = 0, reported_reach = 0;
    ASSERT_TRUE(runs.measure(&reported_bytes, &reported_reach));
    ASSERT_EQ(reported_bytes, bytes);
    ASSERT_EQ(reported_reach, reach);
    Bytes whole;
    const uint64_t wanted_sum = sum_of(wanted, &whole);
    for (const size_t shift : {0, 64, 5}) {
      Bytes target(bytes + 256, 0xa5);
      auto* begin = target.data() + (64 - reinterpret_cast<uintptr_t>(target.data()) % 64) % 64 + shift;
      uint64_t sum = 0;
      ASSERT_TRUE(order_and_sum(runs, {begin, bytes}, random() % 2 == 0, &sum));
      ASSERT_EQ(sum, wanted_sum) << "run of " << run << ", " << sizes.size() << " dimensions";
      ASSERT_EQ(std::memcmp(begin, wanted.data(), bytes), 0);
      for (const uint8_t* at = target.data(); at != target.data() + target.size(); ++at) {
        const bool inside = at >= begin && at < begin + bytes;
        ASSERT_TRUE(inside || *at == 0xa5);
      }
    }
  }
}

TEST(Ordering, WhatDoesNotFitIsRefused) {
  const Bytes memory(4096, 1);
  Bytes target(1024, 7);
  const auto refused = [&](std::vector<int64_t> sizes, std::vector<int64_t> strides, size_t run, size_t length) {
    uint64_t sum = 5;
    const bool fine = order_and_sum({memory.data(), sizes, strides, run}, {target.data(), length}, false, &sum);
    return !fine && sum == 5 && target == Bytes(1024, 7);
  };
  EXPECT_TRUE(refused({4}, {256}, 256, 1023));  // not its bytes
  EXPECT_TRUE(refused({}, {}, 240, 240));       // a sum of its own
  EXPECT_TRUE(refused({4}, {}, 256, 1024));
  EXPECT_TRUE(refused({0}, {256}, 256, 0));
  EXPECT_TRUE(refused({4}, {-256}, 256, 1024));
  EXPECT_TRUE(refused({4}, {256}, 0, 0));
  EXPECT_TRUE(refused({1, 1, 1, 1, 1, 1, 1, 1, 4}, {1, 1, 1, 1, 1, 1, 1, 1, 256}, 256, 1024));
  EXPECT_TRUE(refused({int64_t{1} << 40, int64_t{1} << 40}, {1, 1}, 256, 0));  // would wrap round
  EXPECT_TRUE(refused({int64_t{1} << 20}, {int64_t{1} << 62}, 256, 1024));
}

}  // namespace
}  // namespace asyncfabric::rows
