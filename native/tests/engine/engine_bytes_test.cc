// engine_bytes_test.cc: how many bytes a transfer reports as moved when it fails or is cancelled, over rails that took all of it and
// carried out a part. Driven by hand, one request of the rail at a time.
#include <gtest/gtest.h>

#include <algorithm>

#include "engine/ops/op.h"
#include "rigs/engine_pair.h"

namespace asyncfabric::testing {
namespace {

constexpr uint64_t kPart = 4096;
constexpr uint64_t kTail = 100;
constexpr uint64_t kWhole = 16 * kPart + kTail;

class Bytes : public ::testing::TestWithParam<const char*> {
 protected:
  // A cancelled write is flushed after the drain deadline, however far the test has come by then: none passes here.
  static EngineConfig unhurried() {
    EngineConfig config = Pair::manual(
        {"loopback", "", {{"burst", "1"}, {"request_bytes", "4096"}, {"ordered", GetParam()}, {"seed", "5"}}});
    config.drain_deadline_ns = 60'000'000'000;
    return config;
  }
  Bytes() : pair(unhurried()), source(kWhole, 1), target(kWhole, 0) {
    const uint64_t first = LoopbackHub::shared().next_rail - 2;
    here = LoopbackHub::shared().rails.at(first);
    there = LoopbackHub::shared().rails.at(first + 1);
    const RegionId from = pair.add_region(*pair.a, source);
    const KeyId key = pair.give_key(*pair.b, pair.add_region(*pair.b, target), kWhole, *pair.a);
    const uint64_t opened = pair.a->cookie();
    EXPECT_TRUE(pair.a->engine->submit_write(opened, from, 0, 0, key, 0, 9, &op).ok());
    EXPECT_TRUE(pair.wait(*pair.a, opened).status.ok());
    here->hold(true);
    cookie = pair.a->cookie();
    EXPECT_TRUE(pair.a->engine->submit_write(cookie, from, 0, kWhole, key, 0, kNoImm, &op).ok());
    EXPECT_TRUE(pair.until([&] { return progress().bytes_posted == kWhole; })) << "the rail takes all of it";
  }

  OpProgress progress() const { return pair.a->engine->progress(op); }
  uint64_t arrived() const { return static_cast<uint64_t>(std::count(target.begin(), target.end(), 1)); }
  void carry_out(uint64_t bytes) {
    here->hold(false);
    EXPECT_TRUE(pair.until([&] { return arrived() >= bytes; }));
    here->hold(true);
    pair.turn();
    pair.turn();
  }

  Pair pair;
  std::vector<uint8_t> source, target;
  LoopbackRail* here = nullptr;
  LoopbackRail* there = nullptr;
  OpId op = 0;
  uint64_t cookie = 0;
};

TEST_P(Bytes, OfAFailedWriteAreThoseThatCompleted) {
  EXPECT_EQ(progress().bytes_done, 0u) << "taken by the rail is not gone";
  carry_out(3 * kPart);
  const uint64_t known = progress().bytes_done;
  EXPECT_LE(known, arrived());
  EXPECT_GE(known + kPart, arrived()) << "no more than one request is in doubt: the short one";
  there->kill();
  const Completion done = pair.wait(*pair.a, cookie);
  EXPECT_EQ(done.status.kind, StatusKind::kPeer);
  EXPECT_EQ(done.bytes, known);
}

TEST_P(Bytes, OfACancelledWriteAreAllThatLeft) {
  ASSERT_TRUE(pair.a->engine->cancel(op).ok());
  carry_out(3 * kPart);
  here->hold(false);
  const Completion done = pair.wait(*pair.a, cookie);
  EXPECT_EQ(done.bytes, arrived());
}

INSTANTIATE_TEST_SUITE_P(Order, Bytes, ::testing::Values("1", "0"));

TEST(SentBytes, KnowTheLeastThatLeft) {
  SentBytes sent;
  for (const uint64_t length : {4096u, 8192u, 4096u, 10u}) sent.add(length);
  EXPECT_EQ(sent.learn(4), 0u);
  EXPECT_EQ(sent.learn(3), 10u) << "the short one, perhaps";
  EXPECT_EQ(sent.learn(2), 4096u);
  ++sent.failed;
  EXPECT_EQ(sent.learn(1), 0u) << "a failed request ends nothing well";
  EXPECT_EQ(sent.known, 4106u);
  sent.failed = 0;
  EXPECT_EQ(sent.learn(0), sent.posted - 4106);
  sent.add(1);
  EXPECT_EQ(sent.learn(1), 0u);
  EXPECT_EQ(sent.known, sent.posted - 1) << "what was known stays known";
}

TEST(LongRequests, AreMadeOfMemoryOfAGpuWhereTheRailTakesThem) {
  Pair pair(Pair::manual({"loopback", "", {{"request_bytes", "4096"}, {"gpu_request_bytes", "32768"}}}));
  std::vector<uint8_t> source(kWhole, 1), target(kWhole, 0);
  const KeyId key = pair.give_key(*pair.b, pair.add_region(*pair.b, target), kWhole, *pair.a);
  Engine& engine = *pair.a->engine;
  for (const auto& [device, requests] : {std::pair<int32_t, uint64_t>{kHostDevice, 17}, {0, 3}}) {
    const uint64_t registered = pair.a->cookie();
    ASSERT_TRUE(engine.submit_register(registered, source.data(), source.size(), device, 3).ok());
    const RegionId from = pair.wait(*pair.a, registered).value;
    std::fill(target.begin(), target.end(), uint8_t{0});
    OpId op = 0;
    const uint64_t first = pair.a->cookie(), cookie = pair.a->cookie();
    ASSERT_TRUE(engine.submit_write(first, from, 0, 1, key, 0, kNoImm, &op).ok());
    ASSERT_TRUE(pair.wait(*pair.a, first).status.ok());
    const uint64_t before = engine.statistics().work_requests;
    ASSERT_TRUE(engine.submit_write(cookie, from, 0, kWhole, key, 0, kNoImm, &op).ok());
    ASSERT_TRUE(pair.wait(*pair.a, cookie).status.ok());
    EXPECT_EQ(engine.statistics().work_requests - before, requests) << "device " << device;
    EXPECT_EQ(target, source);
  }
}

}  // namespace
}  // namespace asyncfabric::testing
