// engine_test.cc: the engine over the loopback rail: bytes, counts, cancelling, loss. INV-1 and INV-2 are checked after every step,
// so an early count or completion is seen and not only a wrong end.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "engine/wire.h"
#include "rigs/engine_pair.h"

namespace asyncfabric::testing {
namespace {

std::vector<uint8_t> random_bytes(size_t length, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> bytes(length);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

struct Shape {
  size_t rails_a, rails_b;
  bool ordered;
  uint64_t request_bytes;
};

class EngineShapes : public ::testing::TestWithParam<Shape> {
 protected:
  RailSpec rail() const {
    const Shape& shape = GetParam();
    return {"loopback",
            "",
            {{"ordered", shape.ordered ? "1" : "0"},
             {"early", shape.ordered ? "0" : "1"},
             {"seed", "7"},
             {"request_bytes", std::to_string(shape.request_bytes)},
             {"burst", "3"}}};
  }
};

TEST_P(EngineShapes, WritesArriveWholeAndAreCountedOnceAndNeverEarly) {
  Pair pair(Pair::manual(rail()), GetParam().rails_a, GetParam().rails_b);
  constexpr size_t kSize = 1'000'003;
  std::vector<uint8_t> source = random_bytes(kSize, 1), target(kSize, 0xee);
  const RegionId from = pair.add_region(*pair.a, source);
  const KeyId key = pair.give_key(*pair.b, pair.add_region(*pair.b, target), kSize, *pair.a);
  CounterId counter;
  uint32_t imm;
  ASSERT_TRUE(pair.b->engine->open_counter(5, &counter, &imm).ok());

  const std::vector<std::pair<uint64_t, uint64_t>> ranges = {
      {0, 0}, {1, 1}, {5, 4095}, {4100, 4096}, {9001, 4097}, {20000, 16385}, {40000, 262144}, {310001, 690002}};
  std::vector<uint64_t> cookies;
  for (const auto& [offset, length] : ranges) {
    cookies.push_back(pair.a->cookie());
    OpId op;
    ASSERT_TRUE(pair.a->engine->submit_write(cookies.back(), from, offset, length, key, offset, 5, &op).ok());
  }
  const auto complete = [&] {
    uint64_t whole = 0;
    for (const auto& [offset, length] : ranges)
      whole +=
          std::equal(source.begin() + static_cast<long>(offset), source.begin() + static_cast<long>(offset + length),
                     target.begin() + static_cast<long>(offset));
    return whole;
  };
  ASSERT_TRUE(pair.until([&] {
    const uint64_t counted = pair.b->engine->counter_value(counter);
    EXPECT_LE(counted, complete()) << "INV-1: counted before its bytes were there";
    return counted == ranges.size() || ::testing::Test::HasFailure();
  }));
  for (const uint64_t cookie : cookies) {
    const Completion done = pair.wait(*pair.a, cookie);
    EXPECT_TRUE(done.status.ok());
  }
  for (int i = 0; i < 100; ++i) pair.turn();
  EXPECT_EQ(pair.b->engine->counter_value(counter), ranges.size());
}

TEST_P(EngineShapes, PagesAreCountedEachAndNeverEarly) {
  Pair pair(Pair::manual(rail()), GetParam().rails_a, GetParam().rails_b);
  constexpr uint64_t kPage = 64, kPages = 2500;
  std::vector<uint8_t> source = random_bytes(kPage * kPages, 2), target(kPage * kPages, 0xee);
  const RegionId from = pair.add_region(*pair.a, source);
  const KeyId key = pair.give_key(*pair.b, pair.add_region(*pair.b, target), target.size(), *pair.a);
  CounterId counter;
  uint32_t imm;
  ASSERT_TRUE(pair.b->engine->open_counter(kNoImm, &counter, &imm).ok());
  std::vector<int64_t> sources(kPages), targets(kPages);
  for (size_t i = 0; i < kPages; ++i) sources[i] = targets[i] = static_cast<int64_t>(i);
  std::mt19937 random(3);
  std::shuffle(sources.begin(), sources.begin() + kPages / 2,
               random);  // the second half stays adjacent: runs are merged
  std::shuffle(targets.begin(), targets.begin() + kPages / 2, random);
  PageBatch batch{sources.data(), targets.data(), kPages, kPage, kPage, kPage, 0, 0};
  const uint64_t cookie = pair.a->cookie();
  OpId op;
  ASSERT_TRUE(pair.a->engine->submit_write_pages(cookie, from, key, batch, imm, &op).ok());
  ASSERT_TRUE(pair.until([&] {
    const uint64_t counted = pair.b->engine->counter_value(counter);
    uint64_t there = 0;
    for (size_t i = 0; i < kPages; ++i)
      there += std::equal(&source[static_cast<size_t>(sources[i]) * kPage],
                          &source[static_cast<size_t>(sources[i]) * kPage] + kPage,
                          &target[static_cast<size_t>(targets[i]) * kPage]);
    EXPECT_LE(counted, there) << "INV-1";
    return counted == kPages || ::testing::Test::HasFailure();
  }));
  EXPECT_TRUE(pair.wait(*pair.a, cookie).status.ok());
  const EngineStatistics sent = pair.a->engine->statistics();
  if (GetParam().ordered) {
    EXPECT_LE(sent.immediates_sent, std::max(GetParam().rails_a, GetParam().rails_b) + 3)
        << "one per lane and 1,024 pages";
  }
}

INSTANTIATE_TEST_SUITE_P(Lanes, EngineShapes,
                         ::testing::Values(Shape{1, 1, true, 1 << 30}, Shape{1, 1, true, 10'000},
                                           Shape{1, 1, false, 10'000}, Shape{2, 2, true, 1 << 30},
                                           Shape{2, 3, false, 1 << 30}, Shape{3, 1, true, 100'000},
                                           Shape{4, 4, false, 50'000}),
                         [](const auto& info) {
                           const Shape& s = info.param;
                           return std::to_string(s.rails_a) + "to" + std::to_string(s.rails_b) +
                                  (s.ordered ? "Ordered" : "Unordered") + std::to_string(s.request_bytes);
                         });

TEST(EngineTest, EarlyArrivalsAreKeptAndLateOnesAreStale) {
  Pair pair(Pair::manual(plain()));
  const uint64_t connect = pair.a->cookie();
  ASSERT_TRUE(pair.a->engine->submit_connect(connect, pair.b->engine->address()).ok());
  const PeerId peer = pair.wait(*pair.a, connect).value;
  OpId op;
  const auto signal = [&] {
    const uint64_t cookie = pair.a->cookie();
    ASSERT_TRUE(pair.a->engine->submit_signal(cookie, &peer, 1, 77, &op).ok());
    ASSERT_TRUE(pair.wait(*pair.a, cookie).status.ok());
    for (int i = 0; i < 10; ++i) pair.turn();
  };
  signal();
  CounterId counter;
  uint32_t imm;
  ASSERT_TRUE(pair.b->engine->open_counter(77, &counter, &imm).ok());
  EXPECT_EQ(pair.b->engine->counter_value(counter), 1u);
  const uint64_t armed = pair.b->cookie();
  ASSERT_TRUE(pair.b->engine->arm_counter(counter, armed, 1).ok());
  EXPECT_EQ(pair.wait(*pair.b, armed).value, 1u) << "an already reached target completes too";
  EXPECT_FALSE(pair.b->engine->open_counter(77, &counter, &imm).ok()) << "two users of one imm";
  pair.b->engine->close_counter(counter);
  signal();
  EXPECT_EQ(pair.b->engine->statistics().stale_arrivals, 1u);
  CounterId again;
  again = pair.open_counter(*pair.b, 77);
  EXPECT_EQ(pair.b->engine->counter_value(again), 0u);
  signal();
  EXPECT_EQ(pair.b->engine->counter_value(again), 1u);
}

class EngineCancel : public ::testing::TestWithParam<std::pair<int, const char*>> {};

TEST_P(EngineCancel, CancelledOpLeavesNothingBehind) {
  const auto [rails, ordered] = GetParam();
  EngineConfig config = Pair::manual(plain());
  config.rails.clear();
  for (int rail = 0; rail < rails; ++rail)  // of unequal depth, so that one lane is drained long before the other
    config.rails.push_back({"loopback",
                            "",
                            {{"burst", "1"},
                             {"depth", std::to_string(4 + 20 * rail)},
                             {"request_bytes", "4096"},
                             {"ordered", ordered},
                             {"seed", "3"}}});
  Pair pair(config);
  std::vector<uint8_t> source = random_bytes(1 << 20, 4), target(1 << 20, 0xee);
  const RegionId from = pair.add_region(*pair.a, source);
  const KeyId key = pair.give_key(*pair.b, pair.add_region(*pair.b, target), target.size(), *pair.a);
  const uint64_t cookie = pair.a->cookie();
  OpId op;
  ASSERT_TRUE(pair.a->engine->submit_write(cookie, from, 0, source.size(), key, 0, 9, &op).ok());
  ASSERT_TRUE(pair.until([&] { return pair.a->engine->progress(op).bytes_posted > 0; }));
  ASSERT_TRUE(pair.a->engine->cancel(op).ok());
  const Completion done = pair.wait(*pair.a, cookie);
  EXPECT_EQ(done.status.code, StatusCode::kCancelled);
  EXPECT_LT(done.bytes, source.size());
  // INV-2: from here on the source may be overwritten.
  std::fill(source.begin(), source.end(), 0x55);
  const std::vector<uint8_t> at_return = target;
  for (int i = 0; i < 200; ++i) pair.turn();
  EXPECT_EQ(target, at_return);
  EXPECT_EQ(pair.b->engine->statistics().immediates_received, 0u) << "a cancelled write is not counted";
}

INSTANTIATE_TEST_SUITE_P(Rails, EngineCancel,
                         ::testing::Values(std::pair{1, "1"}, std::pair{2, "1"}, std::pair{3, "0"}, std::pair{1, "0"}));

TEST(EngineTest, BoundsRightsAndHandlesAreRefusedAtTheCall) {
  Pair pair(Pair::manual(plain()));
  std::vector<uint8_t> source(4096), target(4096);
  const RegionId from = pair.add_region(*pair.a, source);
  const RegionId to = pair.add_region(*pair.b, target);
  const KeyId key = pair.give_key(*pair.b, to, 4096, *pair.a);
  const KeyId read_only = pair.give_key(*pair.b, to, 4096, *pair.a, kAccessRemoteRead);
  Engine& engine = *pair.a->engine;
  OpId op;
  EXPECT_EQ(engine.submit_write(1, from, 1, 4096, key, 0, kNoImm, &op).code, StatusCode::kOutOfBounds);
  EXPECT_EQ(engine.submit_write(1, from, 0, 4096, key, 1, kNoImm, &op).code, StatusCode::kOutOfBounds);
  EXPECT_EQ(engine.submit_write(1, from, ~0ull, 2, key, 0, kNoImm, &op).code, StatusCode::kOutOfBounds);
  EXPECT_EQ(engine.submit_write(1, from, 0, 1, read_only, 0, kNoImm, &op).code, StatusCode::kAccessDenied);
  EXPECT_EQ(engine.submit_write(1, from, 0, 1, key, 0, kMaxImm + 1, &op).code, StatusCode::kInvalidArgument);
  EXPECT_EQ(engine.submit_write(1, from + (1ull << 32), 0, 1, key, 0, kNoImm, &op).code, StatusCode::kClosed);
  EXPECT_EQ(engine.submit_write(1, from, 0, 1, key + (1ull << 32), 0, kNoImm, &op).code, StatusCode::kStaleKey);
  const int64_t bad[] = {-1}, good[] = {0};
  PageBatch batch{bad, good, 1, 64, 64, 64, 0, 0};
  EXPECT_EQ(engine.submit_write_pages(1, from, key, batch, kNoImm, &op).code, StatusCode::kOutOfBounds);
  EXPECT_EQ(engine.statistics().ops_submitted, 0u);
}

TEST(EngineTest, FullSlabIsBusyAndRecovers) {
  EngineConfig config = Pair::manual(plain());
  config.max_ops = 8;
  Pair pair(config);
  std::vector<uint8_t> source(64), target(64);
  const RegionId from = pair.add_region(*pair.a, source);
  const KeyId key = pair.give_key(*pair.b, pair.add_region(*pair.b, target), 64, *pair.a);
  OpId op;
  for (int i = 0; i < 8; ++i)
    ASSERT_TRUE(pair.a->engine->submit_write(pair.a->cookie(), from, 0, 64, key, 0, kNoImm, &op).ok());
  EXPECT_EQ(pair.a->engine->submit_write(99, from, 0, 64, key, 0, kNoImm, &op).code, StatusCode::kBusy);
  const uint64_t writable = pair.a->cookie(), second = pair.a->cookie();
  ASSERT_TRUE(pair.a->engine->arm_writable(writable).ok());
  ASSERT_TRUE(pair.a->engine->arm_writable(second).ok());
  EXPECT_EQ(pair.wait(*pair.a, writable).kind, CompletionKind::kWritable);
  EXPECT_EQ(pair.wait(*pair.a, second).kind, CompletionKind::kWritable) << "every waiter is notified";
  const uint64_t late = pair.a->cookie();
  ASSERT_TRUE(pair.a->engine->arm_writable(late).ok());
  EXPECT_EQ(pair.wait(*pair.a, late).kind, CompletionKind::kWritable) << "there is room already";
  EXPECT_TRUE(pair.a->engine->submit_write(pair.a->cookie(), from, 0, 64, key, 0, kNoImm, &op).ok());
}

// A counter that has its count already is reported without an op: those may all be in flight, and who waits for a count can do nothing about it.
TEST(EngineTest, AReachedCounterIsReportedWhenNoOpIsFree) {
  EngineConfig config = Pair::manual(plain());
  config.max_ops = 8;
  Pair pair(config);
  std::vector<uint8_t> source(64), target(64);
  const RegionId from = pair.add_region(*pair.a, source);
  const KeyId key = pair.give_key(*pair.b, pair.add_region(*pair.b, target), 64, *pair.a);
  const uint64_t connect = pair.b->cookie(), signal = pair.b->cookie();
  ASSERT_TRUE(pair.b->engine->submit_connect(connect, pair.a->engine->address()).ok());
  const PeerId peer = pair.wait(*pair.b, connect).value;
  OpId op;
  ASSERT_TRUE(pair.b->engine->submit_signal(signal, &peer, 1, 7, &op).ok());
  ASSERT_TRUE(pair.wait(*pair.b, signal).status.ok());
  CounterId counter;
  uint32_t imm;
  ASSERT_TRUE(pair.a->engine->open_counter(7, &counter, &imm).ok());
  ASSERT_TRUE(pair.until([&] { return pair.a->engine->counter_value(counter) == 1; }));
  while (pair.a->engine->submit_write(pair.a->cookie(), from, 0, 64, key, 0, kNoImm, &op).ok()) {}
  const uint64_t armed = pair.a->cookie();
  EXPECT_TRUE(pair.a->engine->arm_counter(counter, armed, 1).ok());
  EXPECT_EQ(pair.wait(*pair.a, armed).value, 1u);
}

TEST(EngineTest, MessagesKeepOrderAndHoldBackTheSender) {
  Pair pair(Pair::manual(plain()));
  const uint64_t connect = pair.a->cookie();
  ASSERT_TRUE(pair.a->engine->submit_connect(connect, pair.b->engine->address()).ok());
  const PeerId peer = pair.wait(*pair.a, connect).value;
  std::vector<uint64_t> cookies;
  OpId op;
  for (uint32_t i = 0; i < 200; ++i) {
    cookies.push_back(pair.a->cookie());
    ASSERT_TRUE(pair.a->engine->submit_send(cookies.back(), peer, &i, sizeof i, &op).ok());
  }
  for (int i = 0; i < 500; ++i) pair.turn();
  EXPECT_FALSE(pair.a->done.contains(cookies.back())) << "an untaken message must hold its sender back";
  uint32_t expected = 0;
  ASSERT_TRUE(pair.until([&] {
    std::vector<ReceivedMessage> taken;
    pair.b->engine->take_messages(7, &taken);
    for (const ReceivedMessage& message : taken) {
      uint32_t value;
      std::memcpy(&value, message.payload.data(), sizeof value);
      EXPECT_EQ(value, expected++);
    }
    return expected == 200;
  }));
}

TEST(EngineTest, WorkersWithSleepAndCallersLoseNothing) {
  EngineConfig config;
  config.rails = {plain()};
  config.rails[0].options = {{"fd", "1"}};
  config.spin_ns = 0;  // sleep after every pass: each wake-up is a real one
  Pair pair(config);
  const uint64_t there = pair.a->cookie(), back = pair.b->cookie();
  ASSERT_TRUE(pair.a->engine->submit_connect(there, pair.b->engine->address()).ok());
  ASSERT_TRUE(pair.b->engine->submit_connect(back, pair.a->engine->address()).ok());
  const PeerId to_b = pair.wait(*pair.a, there).value, to_a = pair.wait(*pair.b, back).value;
  CounterId counter_a, counter_b;
  uint32_t imm;
  ASSERT_TRUE(pair.a->engine->open_counter(1, &counter_a, &imm).ok());
  ASSERT_TRUE(pair.b->engine->open_counter(1, &counter_b, &imm).ok());
  OpId op;
  for (uint64_t i = 1; i <= 2000; ++i) {
    uint64_t value;
    ASSERT_TRUE(pair.a->engine->submit_signal(i + 100, &to_b, 1, 1, &op).ok());
    ASSERT_TRUE(pair.b->engine->spin_counter(counter_b, i, now_ns() + 5'000'000'000, &value).ok()) << i;
    ASSERT_TRUE(pair.b->engine->submit_signal(i + 100, &to_a, 1, 1, &op).ok());
    ASSERT_TRUE(pair.until([&] { return pair.a->engine->counter_value(counter_a) == i; })) << i;
  }
}

TEST(EngineTest, CloseDrainsWhatNobodyAwaited) {
  Pair pair(Pair::manual(plain()));
  std::vector<uint8_t> source = random_bytes(100'000, 5), target(100'000, 0xee);
  const RegionId from = pair.add_region(*pair.a, source);
  const KeyId key = pair.give_key(*pair.b, pair.add_region(*pair.b, target), target.size(), *pair.a);
  OpId op;
  ASSERT_TRUE(pair.a->engine->submit_write(pair.a->cookie(), from, 0, source.size(), key, 0, kNoImm, &op).ok());
  const uint64_t closing = pair.a->cookie();
  ASSERT_TRUE(pair.a->engine->submit_close(closing, false).ok());
  EXPECT_EQ(pair.wait(*pair.a, closing).kind, CompletionKind::kClosed);
  EXPECT_EQ(target, source);
  EXPECT_EQ(pair.a->engine->submit_write(1, from, 0, 1, key, 0, kNoImm, &op).code, StatusCode::kClosed);
}

TEST(EngineTest, ReleaseWaitsForTheOpsInFlight) {
  RailSpec slow = plain();
  slow.options = {{"burst", "1"}, {"request_bytes", "1024"}};
  Pair pair(Pair::manual(slow));
  std::vector<uint8_t> source = random_bytes(64 * 1024, 6), target(64 * 1024, 0xee);
  const RegionId from = pair.add_region(*pair.a, source);
  const KeyId key = pair.give_key(*pair.b, pair.add_region(*pair.b, target), target.size(), *pair.a);
  const uint64_t write = pair.a->cookie(), release = pair.a->cookie();
  OpId op;
  ASSERT_TRUE(pair.a->engine->submit_write(write, from, 0, source.size(), key, 0, kNoImm, &op).ok());
  ASSERT_TRUE(pair.a->engine->submit_release(release, from).ok());
  EXPECT_EQ(pair.a->engine->submit_write(1, from, 0, 1, key, 0, kNoImm, &op).code, StatusCode::kClosed);
  EXPECT_TRUE(pair.wait(*pair.a, release).status.ok());
  EXPECT_TRUE(pair.a->done.contains(write)) << "released while an op could still read the memory";
}

TEST(EngineTest, StaleKeysAreRefused) {
  Pair pair(Pair::manual(plain()));
  std::vector<uint8_t> source(64, 1), target(64, 0xee);
  const RegionId from = pair.add_region(*pair.a, source), to = pair.add_region(*pair.b, target);
  const KeyId key = pair.give_key(*pair.b, to, 64, *pair.a);
  const uint64_t revoke = pair.b->cookie(), write = pair.a->cookie();
  ASSERT_TRUE(pair.b->engine->submit_revoke(revoke, to).ok());
  ASSERT_TRUE(pair.wait(*pair.b, revoke).status.ok());
  OpId op;
  ASSERT_TRUE(pair.a->engine->submit_write(write, from, 0, 64, key, 0, 3, &op).ok());
  EXPECT_EQ(pair.wait(*pair.a, write).status.kind, StatusKind::kStale);
  EXPECT_EQ(target, std::vector<uint8_t>(64, 0xee));
  const KeyId fresh = pair.give_key(*pair.b, to, 64, *pair.a);
  const uint64_t again = pair.a->cookie();
  ASSERT_TRUE(pair.a->engine->submit_write(again, from, 0, 64, fresh, 0, kNoImm, &op).ok());
  EXPECT_TRUE(pair.wait(*pair.a, again).status.ok());
}

// A control job that ends an op must not leave its completion behind: nobody steps this engine any more when it does.
TEST(EngineTest, WhatAControlJobEndsIsPublishedWithoutAnotherPass) {
  Pair pair(Pair::manual(plain()));
  std::vector<uint8_t> source(64, 1), target(64, 0xee);
  const RegionId from = pair.add_region(*pair.a, source);
  const RegionId to = pair.add_region(*pair.b, target);
  const KeyId good = pair.give_key(*pair.b, to, 64, *pair.a);
  OpId op;
  const uint64_t first = pair.a->cookie();
  ASSERT_TRUE(pair.a->engine->submit_write(first, from, 0, 64, good, 0, kNoImm, &op).ok());
  ASSERT_TRUE(pair.wait(*pair.a, first).status.ok());
  std::string bytes;
  KeyBlob blob;
  ASSERT_TRUE(pair.b->engine->region_key(to, 3, 0, 64, false, &bytes).ok());
  ASSERT_TRUE(decode_key(bytes, &blob));
  blob.rail_keys = {"no key of this rail"};
  KeyId bad;
  KeyInfo info;
  ASSERT_TRUE(pair.a->engine->open_key(encode_key(blob), &bad, &info).ok());
  const uint64_t write = pair.a->cookie();
  ASSERT_TRUE(pair.a->engine->submit_write(write, from, 0, 64, bad, 0, kNoImm, &op).ok());
  pair.a->engine->step();  // asks the owner
  pair.b->engine->step();
  pair.b->engine->step();  // its engine knows the region, so the verdict is good
  pair.a->engine->step();  // asks the control thread to attach, and that was the last pass
  const uint64_t deadline = now_ns() + 10'000'000'000;
  while (!pair.a->done.contains(write) && now_ns() < deadline) pair.a->take();
  EXPECT_EQ(pair.a->done[write].status.code, StatusCode::kAccessDenied);
}

TEST(EngineTest, DeadPeerFailsByName) {
  EngineConfig config = Pair::manual(plain());
  config.connect_deadline_ns = 300'000'000;
  Pair pair(config);
  std::vector<uint8_t> source(64, 1), target(64, 0xee);
  const RegionId from = pair.add_region(*pair.a, source);
  const KeyId key = pair.give_key(*pair.b, pair.add_region(*pair.b, target), 64, *pair.a);
  const uint64_t first = pair.a->cookie();
  OpId op;
  ASSERT_TRUE(pair.a->engine->submit_write(first, from, 0, 64, key, 0, kNoImm, &op).ok());
  ASSERT_TRUE(pair.wait(*pair.a, first).status.ok());
  pair.b.reset();
  ASSERT_TRUE(pair.until([&] {
    return std::any_of(pair.a->others.begin(), pair.a->others.end(),
                       [](const Completion& c) { return c.kind == CompletionKind::kPeerLost; });
  }));
  const uint64_t late = pair.a->cookie();
  ASSERT_TRUE(pair.a->engine->submit_write(late, from, 0, 64, key, 0, kNoImm, &op).ok());
  EXPECT_EQ(pair.wait(*pair.a, late).status.kind, StatusKind::kPeer);
}

TEST(Wire, EveryKindOfMessageIsRead) {
  for (uint32_t kind = 0; kind <= static_cast<uint32_t>(MessageType::kRefused) + 1; ++kind) {
    std::string bytes(kHeaderBytes, '\0');
    encode_header({static_cast<MessageType>(kind), 1, 2, 3, 4}, bytes.data());
    MessageHeader header;
    std::string_view payload;
    const bool known =
        kind >= static_cast<uint32_t>(MessageType::kHello) && kind <= static_cast<uint32_t>(MessageType::kRefused);
    EXPECT_EQ(decode_header(bytes, &header, &payload), known) << kind;
    if (!known) continue;
    EXPECT_EQ(static_cast<uint32_t>(header.type), kind);
  }
}

}  // namespace
}  // namespace asyncfabric::testing
