// engine_meeting_test.cc: what two engines have to know of each other before the first count, and what they refuse to believe: generations of
// counters while they meet, keys that do not fit their owner, messages beyond what was allowed, ops that wait for one peer and end by another.
#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <thread>

#include "engine/peers/peer.h"
#include "engine/wire.h"
#include "rigs/engine_pair.h"

namespace asyncfabric::testing {
namespace {

void open_and_close(Engine& engine, int64_t imm) {
  CounterId counter = 0;
  uint32_t taken = 0;
  ASSERT_TRUE(engine.open_counter(imm, &counter, &taken).ok());
  engine.close_counter(counter);
}

CounterId open_one(Engine& engine, int64_t imm) {
  CounterId counter = 0;
  uint32_t taken = 0;
  EXPECT_TRUE(engine.open_counter(imm, &counter, &taken).ok());
  return counter;
}

// More reopened counters than fit into one message, and no two of them next to each other.
TEST(Meeting, PeersMeetHoweverManyCountersWereReopened) {
  Pair pair(Pair::manual(plain()));
  constexpr int64_t kApart = 7, kImms = 10'000;
  for (int64_t i = 0; i < kImms; ++i) {
    open_and_close(*pair.b->engine, i * kApart);
    if (i % 3 != 0) open_and_close(*pair.b->engine, i * kApart);  // the next one has generation 2
  }
  const std::set<int64_t> asked = {0, 1, 2, 3000, 5001, 9998, 9999};
  std::vector<CounterId> counters;
  for (const int64_t i : asked) counters.push_back(open_one(*pair.b->engine, i * kApart));
  const PeerId peer = pair.connect(*pair.a, *pair.b);
  OpId op = 0;
  for (const int64_t i : asked) {
    const uint64_t cookie = pair.a->cookie();
    ASSERT_TRUE(pair.a->engine->submit_signal(cookie, &peer, 1, i * kApart, &op).ok());
    ASSERT_TRUE(pair.wait(*pair.a, cookie).status.ok());
  }
  for (int i = 0; i < 20; ++i) pair.turn();
  for (const CounterId counter : counters) EXPECT_EQ(pair.b->engine->counter_value(counter), 1u);
  EXPECT_EQ(pair.b->engine->statistics().stale_arrivals, 0u);
  // A counter that is reopened later is reported by itself.
  pair.b->engine->close_counter(counters[0]);
  const CounterId again = pair.open_counter(*pair.b, 0);
  ASSERT_TRUE(pair.a->engine->submit_signal(pair.a->cookie(), &peer, 1, 0, &op).ok());
  for (int i = 0; i < 20; ++i) pair.turn();
  EXPECT_EQ(pair.b->engine->counter_value(again), 1u);
}

// Its rail reports it while the connection is on its way to the engine, which has no peer yet that it could be the loss of.
TEST(Meeting, APeerThatIsGoneBeforeTheEngineHasItsConnectionIsLostAtOnce) {
  EngineConfig config = Pair::manual(plain());
  config.connect_deadline_ns = 60'000'000'000;
  Pair pair(config);
  std::atomic<bool> connects{false}, goes_on{false};
  LoopbackHub::shared().behind_connect = [&] {
    connects = true;
    while (!goes_on) std::this_thread::yield();
  };
  const uint64_t cookie = pair.a->cookie();
  ASSERT_TRUE(pair.a->engine->submit_connect(cookie, pair.b->engine->address()).ok());
  EXPECT_TRUE(pair.until([&] { return connects.load(); }));
  pair.b.reset();
  for (int i = 0; i < 20; ++i) pair.turn();
  LoopbackHub::shared().behind_connect = {};
  goes_on = true;
  EXPECT_TRUE(pair.until([&] { return pair.a->done.contains(cookie); }, 20));
  EXPECT_EQ(pair.a->done[cookie].status.code, StatusCode::kPeerUnreachable);
  EXPECT_NE(pair.a->engine->last_error().find("nobody listens at its address"), std::string::npos);
}

// They know each other's generations by the greeting; a counter that is closed behind the greeting waits until the peer has confirmed it.
TEST(Meeting, ACounterThatIsClosedWhileTheyShakeHandsIsConfirmed) {
  Pair pair(Pair::manual(plain()));
  const CounterId first = open_one(*pair.a->engine, 5);
  const uint64_t cookie = pair.a->cookie();
  ASSERT_TRUE(pair.a->engine->submit_connect(cookie, pair.b->engine->address()).ok());
  const uint64_t deadline = now_ns() + 10'000'000'000;
  const auto b_knows = [&] {
    const std::vector<PeerInfo> peers = pair.b->engine->peers();
    return !peers.empty() && peers[0].state == static_cast<uint32_t>(PeerState::kConnected);
  };
  // The greeting leaves and is received, its answer is not.
  while (pair.b->engine->peers().empty() && now_ns() < deadline) {
    pair.a->engine->step();
    pair.b->engine->step();
  }
  while (!b_knows() && now_ns() < deadline) pair.b->engine->step();
  ASSERT_TRUE(b_knows());
  ASSERT_EQ(pair.a->engine->peers()[0].state, static_cast<uint32_t>(PeerState::kConnecting));
  pair.a->engine->close_counter(first);
  CounterId counter = 0;
  uint32_t imm = 0;
  EXPECT_EQ(pair.a->engine->open_counter(5, &counter, &imm).code, StatusCode::kUnconfirmed);
  ASSERT_TRUE(pair.wait(*pair.a, cookie).status.ok());
  counter = pair.open_counter(*pair.a, 5);
  const PeerId back = pair.connect(*pair.b, *pair.a);
  OpId op = 0;
  ASSERT_TRUE(pair.b->engine->submit_signal(pair.b->cookie(), &back, 1, 5, &op).ok());
  for (int i = 0; i < 20; ++i) pair.turn();
  EXPECT_EQ(pair.a->engine->counter_value(counter), 1u);
  EXPECT_EQ(pair.a->engine->statistics().stale_arrivals, 0u);
}

// After half a million counters each one takes an imm again, one that was confirmed long ago; so a peer that stands still holds up nobody.
TEST(Meeting, ASilentPeerHoldsUpNoCounterThatIsPicked) {
  EngineConfig config = Pair::manual(plain());
  config.polling = PollingMode::kAdaptive;
  add_loopback();
  Party a(config), b(Pair::manual(plain()));
  for (uint32_t i = 0; i <= kMaxImm / 2; ++i) open_and_close(*a.engine, kNoImm);
  std::atomic<bool> answers{true};
  std::thread engine_of_b([&] {
    while (answers.load()) b.engine->step();
  });
  const uint64_t cookie = a.cookie();
  EXPECT_TRUE(a.engine->submit_connect(cookie, b.engine->address()).ok());
  const uint64_t deadline = now_ns() + 10'000'000'000;
  while (!a.done.contains(cookie) && now_ns() < deadline) a.take();
  const PeerId peer = a.done[cookie].value;
  for (int i = 0; i < 40; ++i) open_and_close(*a.engine, kNoImm);
  CounterId counter = 0;
  uint32_t imm = 0;
  EXPECT_TRUE(a.engine->open_counter(kNoImm, &counter, &imm).ok());
  const PeerId back = b.engine->peers().at(0).id;
  OpId op = 0;
  EXPECT_TRUE(b.engine->submit_signal(b.cookie(), &back, 1, imm, &op).ok());
  while (a.engine->counter_value(counter) == 0 && now_ns() < deadline) std::this_thread::yield();
  EXPECT_EQ(a.engine->counter_value(counter), 1u);
  EXPECT_EQ(a.engine->statistics().stale_arrivals, 0u);
  answers.store(false);
  engine_of_b.join();
  const uint64_t begun = now_ns();
  for (int i = 0; i < 200; ++i) open_and_close(*a.engine, kNoImm);
  EXPECT_LT(now_ns() - begun, config.peer_deadline_host_ns) << "waited for a peer that sends nothing";
  EXPECT_NE(peer, 0u);
  while (a.engine->statistics().unconfirmed_closes == 0 && now_ns() < deadline) std::this_thread::yield();
  EXPECT_LT(now_ns(), deadline) << "its own closes wait for it";
}

// A scatter waits for its second peer when the first one revokes its key: it ends once, and nobody starts it again.
TEST(Meeting, AnOpThatWaitsForOnePeerEndsOnceByTheKeyOfAnother) {
  Pair pair(Pair::manual(plain()));
  Party third(pair.config);
  std::vector<uint8_t> source(64, 1), near(64, 0xee), far(64, 0xee);
  const RegionId from = pair.add_region(*pair.a, source), to = pair.add_region(*pair.b, near);
  const KeyId near_key = pair.give_key(*pair.b, to, 64, *pair.a);
  const uint64_t registering = third.cookie();
  ASSERT_TRUE(third.engine->submit_register(registering, far.data(), far.size(), kHostDevice, 3).ok());
  ASSERT_TRUE(pair.until([&] {
    third.engine->step();
    third.take();
    return third.done.contains(registering);
  }));
  const KeyId far_key = pair.give_key(third, third.done[registering].value, 64, *pair.a);
  OpId op = 0;
  const uint64_t first = pair.a->cookie();
  ASSERT_TRUE(pair.a->engine->submit_write(first, from, 0, 64, near_key, 0, kNoImm, &op).ok());
  ASSERT_TRUE(pair.wait(*pair.a, first).status.ok());

  const ScatterTarget targets[] = {{near_key, 0, 0, 64}, {far_key, 0, 0, 64}};
  const uint64_t scatter = pair.a->cookie();
  ASSERT_TRUE(pair.a->engine->submit_scatter(scatter, from, targets, 2, kNoImm, &op).ok());
  for (int i = 0; i < 20; ++i) pair.turn();  // the third engine takes no step, so it does not answer
  ASSERT_FALSE(pair.a->done.contains(scatter));
  const uint64_t revoking = pair.b->cookie();
  ASSERT_TRUE(pair.b->engine->submit_revoke(revoking, to).ok());
  EXPECT_EQ(pair.wait(*pair.a, scatter).status.kind, StatusKind::kStale);
  ASSERT_TRUE(pair.until([&] {
    third.engine->step();
    return pair.a->engine->peers()[1].state == static_cast<uint32_t>(PeerState::kConnected);
  }));
  for (int i = 0; i < 20; ++i) pair.turn();
  const EngineStatistics now = pair.a->engine->statistics();
  EXPECT_EQ(now.ops_submitted, 2u);
  EXPECT_EQ(now.ops_completed, 2u);
}

// Its checksum is right, but it has keys for fewer rails than its owner has.
TEST(Meeting, AKeyThatDoesNotFitItsOwnerIsRefused) {
  Pair pair(Pair::manual(plain()), 2, 2);
  std::vector<uint8_t> source(64, 1), target(64, 0xee);
  const RegionId from = pair.add_region(*pair.a, source), to = pair.add_region(*pair.b, target);
  pair.connect(*pair.a, *pair.b);
  std::string bytes;
  KeyBlob blob;
  AddressBlob owner;
  ASSERT_TRUE(pair.b->engine->region_key(to, 3, 0, 64, false, &bytes).ok());
  ASSERT_TRUE(decode_key(bytes, &blob));
  ASSERT_TRUE(decode_address(blob.address, &owner));
  owner.rails.pop_back();
  blob.rail_keys.pop_back();
  blob.address = encode_address(owner);
  KeyId key = 0;
  KeyInfo info;
  ASSERT_TRUE(pair.a->engine->open_key(encode_key(blob), &key, &info).ok());
  const uint64_t write = pair.a->cookie();
  OpId op = 0;
  ASSERT_TRUE(pair.a->engine->submit_write(write, from, 0, 64, key, 0, kNoImm, &op).ok());
  EXPECT_EQ(pair.wait(*pair.a, write).status.code, StatusCode::kAccessDenied);
  EXPECT_EQ(target, std::vector<uint8_t>(64, 0xee));
}

// A peer that does not wait for its messages to be taken fills no more memory than one that does.
TEST(Meeting, MessagesBeyondTheCreditAreRefused) {
  Pair pair(Pair::manual(plain()));
  pair.connect(*pair.a, *pair.b);
  AddressBlob sender, receiver;
  ASSERT_TRUE(decode_address(pair.a->engine->address(), &sender));
  ASSERT_TRUE(decode_address(pair.b->engine->address(), &receiver));
  LoopbackRail rail(plain());
  std::unique_ptr<RailPeer> path;
  ASSERT_TRUE(rail.connect(receiver.rails[0].address, 0, &path).ok());
  for (uint64_t i = 0; i < 1000; ++i) {
    std::string bytes(kUserHeadBytes + 1, '\0');
    bytes[kHeaderBytes] = 1;  // its length
    encode_header({MessageType::kUser, sender.incarnation, receiver.incarnation, i, 0}, bytes.data());
    WorkRequest request;
    request.kind = WorkKind::kSend;
    request.peer = path.get();
    request.address = bytes.data();
    request.length = bytes.size();
    ASSERT_EQ(rail.post({&request, 1}).accepted, 1u);
    RailEvent events[4];
    rail.poll(events);
    pair.turn();
  }
  for (int i = 0; i < 20; ++i) pair.turn();
  EXPECT_EQ(pair.b->engine->statistics().messages_received, kMessageCredits);
}

}  // namespace
}  // namespace asyncfabric::testing
