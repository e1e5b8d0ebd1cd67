// engine_closings_test.cc: INV-1 at the end of a counter. Counts that are late, by a lane that holds them, by a queue, by a receiver that has not
// looked, reach no later counter of the same imm; copies of old closings bring no old generation back; nobody else waits for a peer that stands
// still. The tests choose the interleaving; tests/integration/test_counter_storm.py has the one that time chooses.
#include <gtest/gtest.h>

#include <algorithm>

#include "engine/counters/closings.h"
#include "engine/wire.h"
#include "rigs/engine_pair.h"

namespace asyncfabric::testing {
namespace {

constexpr int64_t kImm = 5;

class Closing : public ::testing::Test {
 protected:
  void open(size_t rails, RailSpec spec = {"loopback", "", {}}) {
    pair = std::make_unique<Pair>(Pair::manual(std::move(spec)), rails, rails);
    std::vector<LoopbackRail*> all;
    for (const auto& [number, rail] : LoopbackHub::shared().rails) all.push_back(rail);
    if (all.size() == 2 * rails) writers.assign(all.begin(), all.begin() + static_cast<ptrdiff_t>(rails));
    if (all.size() == 2 * rails) owners.assign(all.begin() + static_cast<ptrdiff_t>(rails), all.end());
    peer = pair->connect(*pair->a, *pair->b);
  }
  uint64_t signal() {
    const uint64_t cookie = pair->a->cookie();
    OpId op = 0;
    EXPECT_TRUE(pair->a->engine->submit_signal(cookie, &peer, 1, kImm, &op).ok());
    return cookie;
  }
  void turns(int count = 30) {
    for (int i = 0; i < count; ++i) pair->turn();
  }
  Engine& owner() { return *pair->b->engine; }
  bool try_open(CounterId* counter) {
    uint32_t imm = 0;
    return owner().open_counter(kImm, counter, &imm).ok();
  }
  uint64_t stale() { return owner().statistics().stale_arrivals; }

  std::unique_ptr<Pair> pair;
  std::vector<LoopbackRail*> writers, owners;
  PeerId peer = 0;
};

class LateCount : public Closing, public ::testing::WithParamInterface<int> {};

// Of two signals one goes over a lane that holds it, while the counter is closed and opened again so often as it can be.
TEST_P(LateCount, ReachesNoLaterOpeningHoweverOftenItIsOpened) {
  open(2);
  CounterId counter = pair->open_counter(*pair->b, kImm);
  writers[1]->hold(true);
  const uint64_t one = signal(), other = signal();
  ASSERT_TRUE(pair->until([&] { return owner().counter_value(counter) == 1; }));
  for (int opening = 0; opening < GetParam(); ++opening) {
    owner().close_counter(counter);
    turns();
    if (!try_open(&counter)) break;
    turns();
    EXPECT_EQ(owner().counter_value(counter), 0u);
  }
  writers[1]->hold(false);
  turns();
  EXPECT_EQ(owner().counter_value(counter), 0u) << "counted for a later opening";
  EXPECT_EQ(stale(), 1u);
  for (const uint64_t cookie : {one, other}) EXPECT_TRUE(pair->wait(*pair->a, cookie).status.ok());
  owner().close_counter(counter);
  counter = pair->open_counter(*pair->b, kImm);
  signal();
  EXPECT_TRUE(pair->until([&] { return owner().counter_value(counter) == 1; }));
}

INSTANTIATE_TEST_SUITE_P(Openings, LateCount, ::testing::Values(1, 2, 3, 4, 5));

// They were submitted, and the rail had no room for all of them: what they count for was decided then.
TEST_F(Closing, WhatWaitsInAQueueCountsForTheCounterThatItWasSubmittedFor) {
  open(1, {"loopback", "", {{"depth", "4"}}});
  CounterId counter = pair->open_counter(*pair->b, kImm);
  writers[0]->hold(true);
  for (int i = 0; i < 12; ++i) signal();
  turns();
  owner().close_counter(counter);
  turns();
  const bool opened = try_open(&counter);
  turns();
  EXPECT_FALSE(opened) << "twelve counts are under way";
  writers[0]->hold(false);
  turns();
  if (!opened) counter = pair->open_counter(*pair->b, kImm);
  EXPECT_EQ(owner().counter_value(counter), 0u);
  EXPECT_EQ(stale(), 12u);
}

// The writer's transport is done with it, and the owner has not looked: the confirmation stands behind it, on its own lane.
TEST_F(Closing, IsConfirmedOverEachLaneBehindWhatThatOneCarries) {
  open(2);
  CounterId counter = pair->open_counter(*pair->b, kImm);
  owners[1]->be_deaf(true);
  const uint64_t one = signal(), other = signal();
  for (const uint64_t cookie : {one, other}) EXPECT_TRUE(pair->wait(*pair->a, cookie).status.ok());
  ASSERT_TRUE(pair->until([&] { return owner().counter_value(counter) == 1; }));
  for (int opening = 0; opening < 4; ++opening) {
    owner().close_counter(counter);
    turns();
    if (!try_open(&counter)) break;
    turns();
  }
  owners[1]->be_deaf(false);
  turns();
  EXPECT_EQ(owner().counter_value(counter), 0u);
  EXPECT_EQ(stale(), 1u);
  EXPECT_EQ(owner().statistics().unconfirmed_closes, 0u);
}

// On a rail without order a message may overtake a count that its sender's transport is done with: such counts ask for more.
TEST_F(Closing, CountsOnUnorderedRailsEndWhenTheyAreDelivered) {
  open(1, {"loopback", "", {{"ordered", "0"}, {"early", "1"}, {"burst", "1"}}});
  std::vector<uint8_t> source(64, 1), target(64, 0);
  const RegionId from = pair->add_region(*pair->a, source);
  const KeyId key = pair->give_key(*pair->b, pair->add_region(*pair->b, target), 64, *pair->a);
  const CounterId counter = pair->open_counter(*pair->b, kImm);
  for (int i = 0; i < 20; ++i) {
    const uint64_t before = owner().counter_value(counter), cookie = pair->a->cookie();
    OpId op = 0;
    ASSERT_TRUE(pair->a->engine->submit_write(cookie, from, 0, 64, key, 0, kImm, &op).ok());
    ASSERT_TRUE(pair->until([&] {
      pair->a->engine->step();
      pair->a->take();
      return pair->a->done.contains(cookie);
    }));
    pair->b->engine->step();
    EXPECT_EQ(owner().counter_value(counter), before + 1);
  }
}

// Messages of the first closing, again, behind those of the second: what leaves afterwards is of the third counter.
TEST_F(Closing, AnOldOneThatComesAgainChangesNothing) {
  open(1);
  const auto closings = [&] {
    std::vector<std::string> found;
    for (const std::string& bytes : owners[0]->delivered()) {
      MessageHeader header;
      std::string_view payload;
      if (decode_header(bytes, &header, &payload) && header.type == static_cast<MessageType>(8)) found.push_back(bytes);
    }
    return found;
  };
  CounterId counter = pair->open_counter(*pair->b, kImm);
  for (int opening = 0; opening < 3; ++opening) {
    owner().close_counter(counter);
    turns();
    counter = pair->open_counter(*pair->b, kImm);
    turns();
    for (const std::string& message : closings()) {
      owners[0]->deliver_again(message, *writers[0]);
      turns();
      const uint64_t before = owner().counter_value(counter);
      EXPECT_TRUE(pair->wait(*pair->a, signal()).status.ok());
      turns();
      EXPECT_EQ(owner().counter_value(counter), before + 1) << "stamped with an old generation";
    }
  }
  EXPECT_EQ(stale(), 0u);
  EXPECT_GE(closings().size(), 3u);
}

// The peer takes no step: only the imm that it may still count for waits, for all others it is as if it were not there.
TEST_F(Closing, WaitsForAPeerThatStandsStillAndNobodyElseDoes) {
  open(1);
  CounterId counter = pair->open_counter(*pair->b, kImm);
  owner().close_counter(counter);
  const auto alone = [&] {
    for (int i = 0; i < 10; ++i) {
      owner().step();
      pair->b->take();
    }
  };
  alone();
  uint32_t imm = 0;
  EXPECT_EQ(owner().open_counter(kImm, &counter, &imm).code, StatusCode::kUnconfirmed);
  const uint64_t armed = pair->b->cookie();
  ASSERT_TRUE(owner().arm_closed(armed, kImm).ok());
  const std::vector<ClosingInfo> waits = owner().closings(kNoImm);
  ASSERT_EQ(waits.size(), 1u);
  EXPECT_EQ(waits[0].imm, kImm);
  EXPECT_EQ(waits[0].peers, std::vector<PeerId>{owner().peers().at(0).id});
  EXPECT_TRUE(owner().closings(6).empty());
  CounterId other = 0;
  for (const int64_t free : {int64_t{6}, kNoImm}) {
    EXPECT_TRUE(owner().open_counter(free, &other, &imm).ok());
    owner().close_counter(other);
  }
  alone();
  EXPECT_EQ(owner().statistics().unconfirmed_closes, 3u);
  EXPECT_FALSE(pair->b->done.contains(armed));
  const uint64_t left = pair->b->cookie();  // lost: it counts for nobody any more
  ASSERT_TRUE(owner().submit_disconnect(left, waits[0].peers[0]).ok());
  EXPECT_TRUE(pair->until([&] {
    alone();
    return pair->b->done.contains(armed);
  }));
  EXPECT_TRUE(owner().open_counter(kImm, &counter, &imm).ok());
  EXPECT_EQ(owner().statistics().unconfirmed_closes, 0u);
}

// The writer is stopped, so that the owner loses it, and goes on when the counter was opened four times: its stamp is of 2 bits. What it
// sends over the connection of before counts for nobody; over a new one it does.
class StoppedWriter : public Closing, public ::testing::WithParamInterface<const char*> {};

TEST_P(StoppedWriter, ThatGoesOnCountsForNoLaterOpening) {
  open(1, {GetParam(), "", {}});
  CounterId counter = pair->open_counter(*pair->b, kImm);
  const auto alone = [&](Party& party, int steps = 10) {
    for (int i = 0; i < steps; ++i) {
      party.engine->step();
      party.take();
    }
  };
  signal();
  ASSERT_TRUE(pair->until([&] { return owner().counter_value(counter) == 1; }));
  const uint64_t lost = pair->b->cookie();
  ASSERT_TRUE(owner().submit_disconnect(lost, owner().peers().at(0).id).ok());
  for (const uint64_t until = now_ns() + 10'000'000'000; !pair->b->done.contains(lost) && now_ns() < until;)
    alone(*pair->b);
  for (int opening = 0; opening < 4; ++opening) {
    owner().close_counter(counter);
    ASSERT_TRUE(try_open(&counter));
    alone(*pair->b);
  }
  signal();
  pair->a->engine->step();  // posts before it receives anything
  ASSERT_TRUE(pair->until([&] { return !pair->a->others.empty(); })) << "the writer learns that it was lost";
  turns();
  EXPECT_EQ(owner().counter_value(counter), 0u);
  peer = pair->connect(*pair->a, *pair->b);
  const uint64_t again = signal();
  EXPECT_TRUE(pair->wait(*pair->a, again).status.ok());
  EXPECT_TRUE(pair->until([&] { return owner().counter_value(counter) != 0; }));
  turns();
  EXPECT_EQ(owner().counter_value(counter), 1u) << "a count of before was taken";
}

#ifdef ASYNCFABRIC_WITH_LIBFABRIC
const auto kRealRails = ::testing::Values("local", "tcp");
#else
const auto kRealRails = ::testing::Values("local");
#endif
INSTANTIATE_TEST_SUITE_P(Rails, StoppedWriter, kRealRails, [](const auto& rail) { return std::string(rail.param); });

// An engine is a peer of itself.
TEST_F(Closing, HoldsForCountsOfItsOwn) {
  open(1);
  CounterId counter = pair->open_counter(*pair->b, kImm);
  const PeerId self = pair->connect(*pair->b, *pair->b);
  for (int opening = 0; opening < 6; ++opening) {
    owners[0]->hold(true);
    OpId op = 0;
    ASSERT_TRUE(owner().submit_signal(pair->b->cookie(), &self, 1, kImm, &op).ok());
    turns();
    owner().close_counter(counter);
    turns();
    EXPECT_FALSE(try_open(&counter));
    owners[0]->hold(false);
    counter = pair->open_counter(*pair->b, kImm);
    EXPECT_EQ(owner().counter_value(counter), 0u);
  }
  EXPECT_EQ(stale(), 6u);
}

TEST(Closings, AListIsTakenOnceInWhateverOrderAndConfirmedByEachLane) {
  ClosingsTaken taken;
  using Verdict = ClosingsTaken::Verdict;
  EXPECT_EQ(taken.take(2), Verdict::kNew);
  EXPECT_EQ(taken.take(2), Verdict::kUnderWay);
  taken.hold(2);
  EXPECT_FALSE(taken.release(2));
  EXPECT_TRUE(taken.release(2));
  EXPECT_EQ(taken.take(2), Verdict::kConfirmed);
  EXPECT_EQ(taken.take(1 + kListsAtOnce), Verdict::kRefused);
  EXPECT_EQ(taken.take(1), Verdict::kNew);
  EXPECT_TRUE(taken.release(1));
  EXPECT_EQ(taken.take(1), Verdict::kConfirmed);
  EXPECT_EQ(taken.take(0), Verdict::kConfirmed);
  EXPECT_EQ(taken.take(1 + kListsAtOnce), Verdict::kNew);

  ClosingsAsked asked;
  std::vector<std::pair<uint64_t, Closings>> sent;
  const auto send = [&](uint64_t number, const Closings& closings) { sent.emplace_back(number, closings); };
  asked.add(closing_of(5, 1));
  asked.add(closing_of(9, 6));
  asked.send_new(send);
  asked.send_again(send);
  ASSERT_EQ(sent.size(), 2u);
  EXPECT_EQ(sent[0], sent[1]);
  EXPECT_EQ(sent[0].second, (Closings{5 << 2 | 1, 9 << 2 | 2}));
  EXPECT_TRUE(asked.confirmed(1, 0, 2).empty());
  EXPECT_TRUE(asked.confirmed(1, 0, 2).empty());
  EXPECT_TRUE(asked.confirmed(1, 1, 3).empty()) << "other lanes than before: all of them anew";
  EXPECT_TRUE(asked.confirmed(1, 0, 0).empty());
  EXPECT_TRUE(asked.confirmed(1, 2, 2).empty());
  EXPECT_TRUE(asked.confirmed(1, 0, 2).empty());
  EXPECT_EQ(asked.confirmed(1, 1, 2).size(), 2u);
  EXPECT_TRUE(asked.confirmed(1, 1, 2).empty());
  EXPECT_TRUE(asked.empty());
}

TEST(Closings, ListsAreBoundedInLengthAndNumber) {
  ClosingsAsked asked;
  for (uint32_t imm = 0; imm < kClosingsPerList * (kListsAtOnce + 1); ++imm) asked.add(closing_of(imm, 1));
  uint64_t lists = 0, longest = 0;
  const auto send = [&](uint64_t number, const Closings& closings) {
    EXPECT_EQ(number, ++lists);
    longest = std::max<uint64_t>(longest, closings.size());
  };
  asked.send_new(send);
  EXPECT_EQ(lists, kListsAtOnce);
  EXPECT_EQ(longest, kClosingsPerList);
  asked.send_new(send);
  EXPECT_EQ(lists, kListsAtOnce);
  EXPECT_EQ(asked.confirmed(3, 0, 1).size(), kClosingsPerList);
  asked.send_new(send);
  EXPECT_EQ(lists, kListsAtOnce + 1);
}

}  // namespace
}  // namespace asyncfabric::testing
