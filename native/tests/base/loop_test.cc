// loop_test.cc: the event loop's way to sleep: rung by a rail without the worker, lingering for an answer, and not needed when it is
// busy elsewhere; and threads that poll, which run the engine. Two engines of this process, adaptive, with their own workers.
#include <gtest/gtest.h>
#include <poll.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <string_view>
#include <thread>

#include "base/engine_lock.h"
#include "engine/loop/loop_turn.h"
#include "engine/loop/poll_turn.h"
#include "rigs/engine_pair.h"

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

  // As an event-loop adapter: sleep unless completions are there, wake up, take them.
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
    let_worker_sleep(*pair.a->engine);  // awake, it would post the signal in place of the thread that submits it
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

// Nothing comes to the worker, as if the scheduler never let it run: what moves, threads of the test have moved.
class StarvedRail final : public LoopbackRail {
 public:
  using LoopbackRail::LoopbackRail;
  size_t poll(std::span<RailEvent> events) override { return by_worker() ? 0 : LoopbackRail::poll(events); }
  bool prepare_wait() override { return true; }

  static Status open(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string*) {
    *out = std::make_unique<StarvedRail>(spec);
    return {};
  }

 private:
  static bool by_worker() {
    std::array<char, 16> name{};
    pthread_getname_np(pthread_self(), name.data(), name.size());
    return std::string_view(name.data()) == "af-worker";
  }
};

TEST(PolledTest, AThreadThatPollsMovesWhatTheWorkerDoesNot) {
  add_provider("starved", StarvedRail::open);
  EngineConfig config;
  config.rails = {{"starved", "", {}}};
  config.polling = PollingMode::kAdaptive;
  Pair pair(config);
  Engine &source = *pair.a->engine, &target = *pair.b->engine;
  const auto polled_until = [&](auto condition) {
    return pair.until(
        [&] {
          source.assist();
          target.assist();
          pair.a->take();
          pair.b->take();
          return condition();
        },
        3);
  };
  const uint64_t cookie = pair.a->cookie();
  ASSERT_TRUE(source.submit_connect(cookie, target.address()).ok());
  ASSERT_TRUE(polled_until([&] { return pair.a->done.contains(cookie); }));
  const PeerId peer = pair.a->done[cookie].value;
  CounterId counter = 0;
  uint32_t imm = 0;
  ASSERT_TRUE(target.open_counter(7, &counter, &imm).ok());
  for (uint64_t round = 1; round <= 50; ++round) {
    OpId op = 0;
    const uint64_t signal = pair.a->cookie();
    ASSERT_TRUE(source.submit_signal(signal, &peer, 1, 7, &op).ok());
    ASSERT_TRUE(polled_until([&] { return pair.a->done.contains(signal); })) << "round " << round;
    ASSERT_TRUE(polled_until([&] { return target.counter_value(counter) == round; })) << "round " << round;
  }
}

TEST_F(LoopTest, TheWorkerTakesWhatComesWhenPollsHaveEnded) {
  Engine& target = *pair.b->engine;
  for (uint64_t round = 1; round <= 20; ++round) {
    // Naps of the worker, one after the other; the last one goes on, with the rails unarmed.
    const uint64_t sleeps = target.statistics().sleeps;
    const auto naps = [&] {
      target.assist();
      return target.statistics().sleeps > sleeps + 2;
    };
    ASSERT_TRUE(pair.until(naps, 3)) << "round " << round;
    signal();
    ASSERT_TRUE(pair.until([&] { return target.counter_value(counter) == round; })) << "round " << round;
  }
}

TEST(PollTurnTest, LooksInQuickSuccessionHoldTheEngineForAMoment) {
  PollTurn turn;
  uint64_t now = 1'000'000'000;
  const auto clock = [&] { return now; };
  const auto look = [&](uint64_t gap) {
    now += gap;
    const bool quick = turn.begin(now);
    turn.end(now, quick);
    return quick;
  };
  EXPECT_FALSE(turn.held(clock)) << "before the first look";
  for (uint32_t looks = 0; looks < PollTurn::kLooks; ++looks) EXPECT_FALSE(look(1000)) << "look " << looks;
  EXPECT_FALSE(turn.held(clock));
  EXPECT_TRUE(look(1000));
  EXPECT_TRUE(turn.held(clock));
  now += PollTurn::kKeepNs;
  EXPECT_FALSE(turn.held(clock)) << "when looks have ended";
  EXPECT_FALSE(look(PollTurn::kQuickNs)) << "a look now and then";
  for (uint32_t looks = 0; looks < PollTurn::kLooks; ++looks) look(1000);
  EXPECT_TRUE(turn.held(clock));
  turn.stop();
  EXPECT_FALSE(turn.held(clock)) << "when a thread goes to sleep";
}

TEST(PollTurnTest, APollerThatSharesItsCoreKeepsItsTurn) {
  PollTurn turn;
  uint64_t now = 1'000'000'000;
  const auto look = [&](uint64_t gap) {
    now += gap;
    const bool quick = turn.begin(now);
    turn.end(now, quick);
    return quick;
  };
  for (uint32_t looks = 0; looks < PollTurn::kMostLooks; ++looks) look(1000);
  for (int round = 0; round < 100; ++round) {
    EXPECT_TRUE(look(2 * PollTurn::kQuickNs)) << "a late look, round " << round;
    for (int looks = 0; looks < 20; ++looks) EXPECT_TRUE(look(1000)) << "round " << round;
  }
  int late = 0;
  while (late < 100 && look(2 * PollTurn::kQuickNs)) ++late;
  EXPECT_LT(late, 8) << "looks that are all late";
  for (uint32_t looks = 0; looks < PollTurn::kMostLooks; ++looks) look(1000);
  EXPECT_FALSE(look(PollTurn::kAwayNs)) << "a program that was away";
}

// Who leaves last calls the worker once; a call that got lost would leave it asleep for good.
TEST(EngineLockTest, TheWorkerGetsItsTurnsBetweenThoseOfCallers) {
  EngineLock lock;
  std::atomic<uint32_t> turns{0};
  std::thread worker([&] {
    while (turns.load() < 20'000) {
      lock.lock_as_worker();
      lock.unlock();
      turns.fetch_add(1);
    }
  });
  while (turns.load() < 20'000) {
    EngineLock::Caller caller(lock);
    caller.lock();
    caller.unlock();
  }
  worker.join();
}

}  // namespace
}  // namespace asyncfabric::testing
