// loop_test.cc: the event loop's way to sleep: rung by a rail without the worker, lingering for an answer, and not needed when it is
// busy elsewhere. Two engines of this process over the local provider, adaptive, with their own workers.
#include <gtest/gtest.h>
#include <poll.h>

#include "engine/loop_turn.h"
#include "engine_pair.h"

namespace asyncfabric::testing {
namespace {

constexpr int kPatienceMs = 10'000;

class LoopTest : public ::testing::Test {
 protected:
  explicit LoopTest(EngineConfig config = adaptive()) : pair(std::move(config)) {}

  static EngineConfig adaptive() {
    EngineConfig config;
    config.rails = {{"local", "", {}}};
    config.polling = PollingMode::kAdaptive;
    return config;
  }

  void SetUp() override {
    const uint64_t cookie = pair.a->cookie();
    ASSERT_TRUE(pair.a->engine->submit_connect(cookie, pair.b->engine->address()).ok());
    const Completion connected = pair.wait(*pair.a, cookie);
    ASSERT_TRUE(connected.status.ok());
    peer = connected.value;
    uint32_t imm = 0;
    ASSERT_TRUE(pair.b->engine->open_counter(7, &counter, &imm).ok());
  }

  void signal() {
    OpId op = 0;
    ASSERT_TRUE(pair.a->engine->submit_signal(pair.a->cookie(), &peer, 1, 7, &op).ok());
  }

  // A worker that is awake would take what comes by itself.
  void let_worker_sleep(Engine& engine) {
    const uint64_t sleeps = engine.statistics().sleeps;
    engine.notify();
    ASSERT_TRUE(pair.until([&] { return engine.statistics().sleeps > sleeps; }));
  }

  // What a landing does: sleep unless completions are there, wake up, take them.
  static bool sleep_once(Party& party) {
    if (party.engine->arm()) {
      pollfd fd{party.engine->completion_fd(), POLLIN, 0};
      const int ready = ::poll(&fd, 1, kPatienceMs);
      party.engine->disarm();
      if (ready != 1) return false;
    }
    party.take();
    return true;
  }

  // Arrivals of which the worker had to ring the loop.
  uint64_t rung_by_worker(uint64_t rounds) {
    Engine& target = *pair.b->engine;
    uint64_t by_worker = 0;
    for (const uint64_t last = arrived + rounds; arrived < last && !HasFatalFailure();)
      by_worker += one_arrival(target);
    return by_worker;
  }

  uint64_t one_arrival(Engine& target) {
    const uint64_t cookie = pair.b->cookie();
    EXPECT_TRUE(target.arm_counter(counter, cookie, ++arrived).ok());
    while (!target.arm()) pair.b->take();
    let_worker_sleep(target);
    const uint64_t rings = target.statistics().loop_wakes;
    signal();
    pollfd fd{target.completion_fd(), POLLIN, 0};
    EXPECT_EQ(::poll(&fd, 1, kPatienceMs), 1) << "arrival " << arrived;
    target.disarm();
    const uint64_t by_worker = target.statistics().loop_wakes - rings;
    while (!pair.b->done.contains(cookie) && !HasFailure()) EXPECT_TRUE(sleep_once(*pair.b)) << "arrival " << arrived;
    EXPECT_EQ(pair.b->done[cookie].value, arrived);
    pair.a->take();
    return by_worker;
  }

  uint64_t arrived = 0;
  Pair pair;
  PeerId peer = 0;
  CounterId counter = 0;
};

TEST_F(LoopTest, ARailWakesTheLoopItself) {
  EXPECT_LT(rung_by_worker(300), 100u) << "the worker had to ring the loop for most arrivals";
}

// Both have a rail of a network too, over which nobody came yet.
class MixedLoopTest : public LoopTest {
 protected:
  MixedLoopTest() : LoopTest(mixed()) {}

  static EngineConfig mixed() {
    EngineConfig config = adaptive();
    config.rails.push_back({"loopback", "", {}});
    return config;
  }
};

TEST_F(MixedLoopTest, ARailWakesTheLoopItselfBesideOneThatNobodyUses) {
  EXPECT_LT(rung_by_worker(150), 50u) << "the worker had to ring the loop for most arrivals";
  EXPECT_GT(pair.a->engine->statistics().inline_steps, 0u) << "no signal was posted by the thread that submitted it";
}

TEST_F(MixedLoopTest, TheWorkerKeepsTheRailsWhileAPeerOfTheNetworkIsConnected) {
  {
    EngineConfig config = adaptive();
    config.rails = {{"loopback", "", {}}};
    Party far(config);
    const uint64_t cookie = far.cookie();
    ASSERT_TRUE(far.engine->submit_connect(cookie, pair.b->engine->address()).ok());
    ASSERT_TRUE(pair.until([&] {
      far.take();
      return far.done.contains(cookie);
    }));
    ASSERT_TRUE(far.done[cookie].status.ok());
    EXPECT_GT(rung_by_worker(30), 20u) << "the loop had the rails while somebody needed the worker";
  }
  const auto has_rails_again = [&] { return rung_by_worker(10) < 4; };
  bool again = false;
  for (int tries = 0; tries < 20 && !again; ++tries)
    again = has_rails_again();  // the engine forgets the lost peer first
  EXPECT_TRUE(again);
}

TEST_F(LoopTest, RailsAreServedWhileTheLoopIsArmedButBusyElsewhere) {
  Engine& target = *pair.b->engine;
  for (uint64_t round = 1; round <= 20; ++round) {
    while (!target.arm()) pair.b->take();
    signal();
    // The loop computes and never looks at its descriptor: the worker has to.
    ASSERT_TRUE(pair.until([&] { return target.counter_value(counter) == round; })) << "round " << round;
    target.disarm();
  }
}

TEST_F(LoopTest, AnArrivalAfterTheLastLookIsNotLost) {
  // The bell rings while the loop is awake and nobody sleeps on it: the next sleep ends at once.
  Engine& target = *pair.b->engine;
  for (uint64_t round = 1; round <= 300; ++round) {
    signal();
    const uint64_t cookie = pair.b->cookie();
    ASSERT_TRUE(target.arm_counter(counter, cookie, round).ok());
    while (!pair.b->done.contains(cookie)) ASSERT_TRUE(sleep_once(*pair.b)) << "round " << round;
    pair.a->take();
  }
}

TEST(LoopTurnTest, LingersAfterShortSleepsOnly) {
  constexpr uint64_t kSpin = 20'000;
  LoopTurn turn;
  EXPECT_FALSE(turn.worth_lingering());
  turn.slept(kSpin, kSpin);
  EXPECT_FALSE(turn.worth_lingering());
  turn.slept(kSpin, kSpin);
  EXPECT_TRUE(turn.worth_lingering());
  turn.slept(100 * kSpin, kSpin);
  EXPECT_FALSE(turn.worth_lingering()) << "after a long sleep";
}

TEST(LoopTurnTest, EachSpinInVainAsksForTwiceAsManyShortSleeps) {
  constexpr uint64_t kSpin = 20'000;
  LoopTurn turn;
  for (const int asked : {2, 4, 8, 16}) {
    for (int i = 0; i < asked; ++i) {
      EXPECT_FALSE(turn.worth_lingering()) << i << " of " << asked;
      turn.slept(kSpin, kSpin);
    }
    ASSERT_TRUE(turn.worth_lingering());
    turn.lingered(true);
  }
  for (int i = 0; i < 32; ++i) turn.slept(kSpin, kSpin);
  turn.lingered(false);
  EXPECT_TRUE(turn.worth_lingering()) << "a spin that paid is tried again at once";
}

}  // namespace
}  // namespace asyncfabric::testing
