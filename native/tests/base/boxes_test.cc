// boxes_test.cc: boxes gathered and summed while they are written: any way to cut the work into parts, any order of calls, and whole
// engines with workers over shared memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "asyncfabric/ordering.h"
#include "engine/ops/box_list.h"
#include "rigs/engine_pair.h"
#include "rows/gathered_sum.h"

namespace asyncfabric {
namespace {

using Bytes = std::vector<uint8_t>;
using Numbers = std::vector<int64_t>;

Bytes noise(size_t length, uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(length);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

// Runs of whole stripes in a megabyte, in two dimensions that may overlap.
class AnyBox {
 public:
  AnyBox(std::mt19937_64& random, const Bytes& memory)
      : data_(memory.data() + random() % 100),
        run_(64 * (1 + random() % 130)),
        sizes_{static_cast<int64_t>(1 + random() % 5), static_cast<int64_t>(1 + random() % 7)},
        strides_{static_cast<int64_t>(random() % 20000), static_cast<int64_t>(random() % 9000)} {}
  rows::Runs runs() const { return {data_, sizes_, strides_, run_}; }
  size_t bytes() const {
    size_t bytes = 0, reach = 0;
    EXPECT_TRUE(runs().measure(&bytes, &reach));
    return bytes;
  }

 private:
  const uint8_t* data_;
  size_t run_;
  Numbers sizes_, strides_;
};

TEST(GatheredSum, IsTheSameHoweverTheWorkIsCut) {
  std::mt19937_64 random(3);
  const Bytes memory = noise(1 << 20, 4);
  for (int round = 0; round < 200; ++round) {
    const AnyBox box(random, memory);
    const rows::Runs runs = box.runs();
    const size_t bytes = box.bytes();
    if (bytes < kLeastBoxBytes) continue;
    Bytes whole(bytes);
    uint64_t wanted = 0;
    ASSERT_TRUE(rows::order_and_sum(runs, whole, false, &wanted));
    Bytes padded(bytes + 256, 0xa5);
    uint8_t* target = padded.data() + random() % 128;
    rows::GatheredSum sum(runs, bytes);
    for (size_t done = 0; done < bytes;) {
      const size_t part = std::min(bytes - done, 64 * (1 + random() % 200));
      sum.copy(target + done, part, random() % 2 == 0);
      done += part;
    }
    EXPECT_EQ(sum.sum(), wanted);
    EXPECT_TRUE(std::equal(whole.begin(), whole.end(), target));
    EXPECT_TRUE(std::all_of(padded.data(), target, [](uint8_t byte) { return byte == 0xa5; }));
    EXPECT_TRUE(std::all_of(target + bytes, padded.data() + padded.size(), [](uint8_t byte) { return byte == 0xa5; }));
  }
}

// Steps in turn by one and by many, whose parts come in any order; what one thread makes of it all is what is wanted.
TEST(GatheredSum, IsTheSameWhoeverDoesWhichPart) {
  std::mt19937_64 random(8);
  const Bytes memory = noise(1 << 20, 9);
  size_t in_parts = 0, refused = 0;
  for (int round = 0; round < 300; ++round) {
    const AnyBox box(random, memory);
    const rows::Runs runs = box.runs();
    const size_t bytes = box.bytes();
    if (bytes < kLeastBoxBytes) continue;
    Bytes whole(bytes), target(bytes);
    uint64_t wanted = 0;
    ASSERT_TRUE(rows::order_and_sum(runs, whole, false, &wanted));
    rows::GatheredSum sum(runs, bytes);
    for (size_t done = 0, step; done < bytes; done += step) {
      step = std::min(bytes - done, random() % 3 != 0 ? 1024 * (1 + random() % 40) : 64 * (1 + random() % 300));
      const bool past = random() % 2 == 0;
      if (random() % 4 == 0 || !sum.begin_parts(step)) {
        refused += done % 1024 != 0;
        sum.copy(target.data() + done, step, past);
        continue;
      }
      std::vector<std::pair<size_t, size_t>> parts;
      for (size_t at = 0, length; at < step; at += length) {
        length = std::min(step - at, 1024 * (1 + random() % 8));
        parts.emplace_back(at, length);
      }
      std::shuffle(parts.begin(), parts.end(), random);
      for (const auto& [at, length] : parts) sum.copy_part(target.data() + done + at, at, length, past);
      sum.end_parts();
      in_parts += parts.size();
    }
    EXPECT_EQ(sum.sum(), wanted) << round;
    EXPECT_EQ(target, whole) << round;
  }
  EXPECT_GT(in_parts, 1000u);
  EXPECT_GT(refused, 0u) << "a block that has begun was never met";
}

TEST(BoxList, CopiesInItsOwnOrderAlone) {
  const Bytes source = noise(8192, 5);
  const Numbers rows{0, 0, 64, 8, 128, 4096, 512, 256, 4, 1024};
  std::vector<uint64_t> sums(2);
  BoxList list;
  ASSERT_TRUE(list.fill({rows.data(), 2, 1, sums.data()}, source.data(), source.size(), 8192).ok());
  ASSERT_EQ(list.size(), 2u);
  ASSERT_EQ(list.bytes(0), 512u);
  ASSERT_EQ(list.all_bytes(), 1536u);
  Bytes target(2048);
  EXPECT_FALSE(list.copy(target.data() + 512, 512, 1024)) << "the second before the first";
  EXPECT_FALSE(list.copy(target.data(), 64, 64));
  EXPECT_TRUE(list.copy(target.data(), 0, 128));
  EXPECT_FALSE(list.copy(target.data(), 0, 128)) << "twice";
  EXPECT_TRUE(list.copy(target.data() + 128, 128, 384));
  EXPECT_TRUE(list.copy(target.data() + 512, 512, 1024));
  EXPECT_FALSE(list.copy(target.data(), 1536, 64)) << "behind the end";
  for (size_t run = 0; run < 8; ++run)
    EXPECT_TRUE(std::equal(source.begin() + 128 * run, source.begin() + 128 * run + 64, target.begin() + 64 * run));
  Bytes other(512);
  uint64_t wanted = 0;
  const Numbers sizes{8}, strides{128};
  ASSERT_TRUE(rows::order_and_sum({source.data(), sizes, strides, 64}, other, false, &wanted));
  EXPECT_EQ(sums[0], wanted);
  EXPECT_FALSE(list.begin_parts(1536, 64)) << "behind the end";
  list.clear();
  EXPECT_FALSE(list.begin_parts(0, 64)) << "of nothing";
  EXPECT_EQ(list.size(), 0u);
  EXPECT_EQ(list.all_bytes(), 0u);
  ASSERT_TRUE(list.fill({rows.data(), 1, 1, sums.data()}, source.data(), source.size(), 8192).ok());
  EXPECT_TRUE(list.copy(target.data(), 0, 512)) << "a slot begins anew";
}

TEST(BoxList, RefusesWhatIsNoBoxOrLeavesItsMemory) {
  const Bytes source(4096);
  std::vector<uint64_t> sums(1);
  const auto fill = [&](Numbers row, uint64_t target = 4096) {
    BoxList list;
    return list.fill({row.data(), 1, (row.size() - 3) / 2, sums.data()}, source.data(), source.size(), target).code;
  };
  EXPECT_EQ(fill({0, 0, 4096}), StatusCode::kOk);
  EXPECT_EQ(fill({1, 0, 4096}), StatusCode::kOutOfBounds);
  EXPECT_EQ(fill({64, 0, 4096}), StatusCode::kOutOfBounds);
  EXPECT_EQ(fill({0, 64, 4096}), StatusCode::kOutOfBounds);
  EXPECT_EQ(fill({0, 0, 4096}, 4032), StatusCode::kOutOfBounds);
  EXPECT_EQ(fill({-64, 0, 256}), StatusCode::kOutOfBounds);
  EXPECT_EQ(fill({0, 0, 256, 2, 3904}), StatusCode::kOutOfBounds);
  for (const Numbers& row : {Numbers{0, 0, 192},
                             {0, 0, 0},
                             {0, 0, -64},
                             {0, 0, 100},
                             {0, 0, 256, 0, 64},
                             {0, 0, 256, 2, -64},
                             {0, 0, 256, int64_t{1} << 62, 64}})
    EXPECT_EQ(fill(row), StatusCode::kInvalidArgument) << row.back();
}

// Workers copy, alone or with three helpers, loops submit and take completions, targets are looked at when they are counted.
class EngineBoxes : public ::testing::TestWithParam<std::tuple<std::string, int64_t>> {};

// Boxes that are one request, and that are several.
INSTANTIATE_TEST_SUITE_P(Threads, EngineBoxes,
                         ::testing::Combine(::testing::Values("1", "4"), ::testing::Values(1 << 18, 5 << 19)));

TEST_P(EngineBoxes, ArriveWholeBetweenEnginesWithWorkers) {
  EngineConfig config;
  config.rails = {RailSpec{"local", "", {{"copiers", std::get<0>(GetParam())}}}};
  testing::Pair pair(config);
  constexpr uint64_t kBytes = 8 << 20;
  Bytes source = noise(kBytes, 6), target(kBytes);
  const RegionId from = pair.add_region(*pair.a, source);
  const KeyId key = pair.give_key(*pair.b, pair.add_region(*pair.b, target), kBytes, *pair.a);
  CounterId counter;
  uint32_t imm;
  ASSERT_TRUE(pair.b->engine->open_counter(kNoImm, &counter, &imm).ok());
  Numbers rows;
  const int64_t each = std::get<1>(GetParam()), boxes = (int64_t{4} << 20) / each;
  for (int64_t box = 0; box < boxes; ++box)  // every other KiB, which lie in one piece afterwards
    for (const int64_t number : {box * each, box * each, int64_t{1024}, each / 1024, int64_t{2048}})
      rows.push_back(number);
  uint64_t counted = 0;
  for (int round = 0; round < 20; ++round) {
    std::vector<std::vector<uint64_t>> sums(4, std::vector<uint64_t>(boxes));
    std::vector<uint64_t> cookies;
    OpId op;
    for (auto& found : sums) {
      cookies.push_back(pair.a->cookie());
      const BoxBatch batch{rows.data(), static_cast<size_t>(boxes), 1, found.data()};
      ASSERT_TRUE(pair.a->engine->submit_write_boxes(cookies.back(), from, key, batch, imm, &op).ok());
    }
    for (const uint64_t cookie : cookies) ASSERT_TRUE(pair.wait(*pair.a, cookie).status.ok());
    counted += 4 * boxes;
    ASSERT_TRUE(pair.until([&] { return pair.b->engine->counter_value(counter) == counted; }));
    for (int64_t box = 0; box < boxes; ++box) {
      uint64_t wanted = 0;
      Bytes ordered(each);
      const Numbers sizes{each / 1024}, strides{2048};
      ASSERT_TRUE(rows::order_and_sum({source.data() + rows[5 * box], sizes, strides, 1024}, ordered, false, &wanted));
      for (const auto& found : sums) EXPECT_EQ(found[box], wanted);
      EXPECT_TRUE(std::equal(ordered.begin(), ordered.end(), target.begin() + box * each));
    }
    for (size_t at = 0; at < kBytes; at += 997) ++source[at];  // the next round has other bytes
  }
}

TEST(EngineBoxes, AreRefusedWhereNotAllGoesOverOneRailThatGathers) {
  const Numbers rows{0, 0, 4096};
  uint64_t sum = 0;
  OpId op;
  for (const auto& [provider, rails] : {std::pair<const char*, size_t>{"local", 2}, {"loopback", 1}}) {
    testing::Pair pair(testing::Pair::manual(RailSpec{provider, "", {}}), rails, rails);
    Bytes source(4096), target(4096);
    const RegionId from = pair.add_region(*pair.a, source);
    const KeyId key = pair.give_key(*pair.b, pair.add_region(*pair.b, target), 4096, *pair.a);
    const BoxBatch batch{rows.data(), 1, 0, &sum};
    EXPECT_EQ(pair.a->engine->submit_write_boxes(1, from, key, batch, kNoImm, &op).code, StatusCode::kUnsupported);
    EXPECT_EQ(pair.a->engine->statistics().ops_submitted, 0u);
  }
}

TEST(EngineBoxes, GoToPeersOfTheRailThatGathersBesideOthers) {
  const Numbers rows{0, 0, 4096};
  const RailSpec local{"local", "", {}}, loopback{"loopback", "", {}};
  EngineConfig config = testing::Pair::manual(local);
  config.rails = {local, loopback};
  for (const bool near : {true, false}) {
    testing::Pair pair(config);
    if (!near) pair.b = std::make_unique<testing::Party>(testing::Pair::manual(loopback));
    Bytes source = noise(4096, 3);
    const RegionId from = pair.add_region(*pair.a, source);
    const uint64_t allocated = pair.b->cookie();
    ASSERT_TRUE(pair.b->engine->submit_allocate(allocated, 4096, kHostDevice, 3).ok());
    const RegionId to = pair.wait(*pair.b, allocated).value;
    const KeyId key = pair.give_key(*pair.b, to, 4096, *pair.a);
    pair.connect(*pair.a, *pair.b);
    uint64_t sum = 0;
    const BoxBatch batch{rows.data(), 1, 0, &sum};
    const uint64_t cookie = pair.a->cookie();
    OpId op;
    ASSERT_TRUE(pair.a->engine->submit_write_boxes(cookie, from, key, batch, kNoImm, &op).ok());
    EXPECT_EQ(pair.wait(*pair.a, cookie).status.code, near ? StatusCode::kOk : StatusCode::kUnsupported);
    RegionInfo info;
    ASSERT_TRUE(pair.b->engine->region_info(to, &info).ok());
    const auto* target = static_cast<const uint8_t*>(info.base);
    EXPECT_EQ(std::equal(source.begin(), source.end(), target), near);
  }
}

}  // namespace
}  // namespace asyncfabric
