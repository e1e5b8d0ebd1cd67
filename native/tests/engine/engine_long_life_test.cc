// engine_long_life_test.cc: an engine that lives long meets many peers, and most of them are gone: neither its memory nor a look at all peers
// grows with their number, and what is meant for one that was forgotten is refused, never mistaken.
#include <gtest/gtest.h>

#include "engine/peers/peer_list.h"
#include "rigs/engine_pair.h"

namespace asyncfabric::testing {
namespace {

Status disconnect(Pair& pair, Party& from, PeerId peer) {
  const uint64_t cookie = from.cookie();
  EXPECT_TRUE(from.engine->submit_disconnect(cookie, peer).ok());
  return pair.wait(from, cookie).status;
}

Completion write_one(Pair& pair, RegionId from, KeyId key) {
  const uint64_t cookie = pair.a->cookie();
  OpId op = 0;
  EXPECT_TRUE(pair.a->engine->submit_write(cookie, from, 0, 64, key, 0, kNoImm, &op).ok());
  return pair.wait(*pair.a, cookie);
}

TEST(LongLife, ThoseThatRestAreKeptForAWhileAndLookedAtByNobody) {
  PeerList peers;
  constexpr PeerId kMany = 3000;
  std::vector<PeerId> forgotten;
  const auto rests = [](Peer& peer) { return peer.ended(); };
  const auto forget = [&](const Peer& peer) { forgotten.push_back(peer.id); };
  peers.add().was_connected = true;  // lives on
  for (PeerId id = 2; id <= kMany; ++id) {
    Peer& peer = peers.add();
    ASSERT_EQ(peer.id, id);
    peer.was_connected = true;
    peer.state = id % 2 == 0 ? PeerState::kLost : PeerState::kDisconnected;
    peers.lay_down(rests, forget);
    ASSERT_EQ(peers.awake(), 1u);
  }
  EXPECT_EQ(peers.known(), PeerList::kMostResting + 1);
  ASSERT_EQ(forgotten.size(), kMany - 1 - PeerList::kMostResting);
  for (size_t i = 0; i < forgotten.size(); ++i) ASSERT_EQ(forgotten[i], i + 2);  // the oldest first
  EXPECT_EQ(peers.find(2), nullptr);
  EXPECT_TRUE(peers.existed(2));
  EXPECT_FALSE(peers.existed(kMany + 1));
  ASSERT_NE(peers.find(1), nullptr);
  ASSERT_NE(peers.find(kMany), nullptr);
  EXPECT_EQ(peers.all().front()->id, 1u);
  EXPECT_EQ(peers.all().back()->id, kMany);

  // One that lived longest and is lost last is the last to go.
  peers.find(1)->state = PeerState::kLost;
  peers.lay_down(rests, forget);
  EXPECT_NE(peers.find(1), nullptr);
  EXPECT_EQ(peers.awake(), 0u);
  EXPECT_EQ(peers.known(), PeerList::kMostResting);
}

TEST(LongLife, ManyPeersThatCameAndWentAreForgotten) {
  Pair pair(Pair::manual(plain()));
  std::vector<uint8_t> source(64, 1), target(64, 0xee);
  const RegionId from = pair.add_region(*pair.a, source), to = pair.add_region(*pair.b, target);
  const KeyId key = pair.give_key(*pair.b, to, 64, *pair.a);
  const PeerId first = pair.connect(*pair.a, *pair.b);
  ASSERT_TRUE(write_one(pair, from, key).status.ok());  // the key knows its peer by now
  EXPECT_TRUE(disconnect(pair, *pair.a, first).ok());
  constexpr uint64_t kRounds = PeerList::kMostResting + 100;
  for (uint64_t round = 0; round < kRounds; ++round) {
    const PeerId peer = pair.connect(*pair.a, *pair.b);
    ASSERT_EQ(peer, first + round + 1);
    ASSERT_TRUE(disconnect(pair, *pair.a, peer).ok());
  }
  for (Party* party : {pair.a.get(), pair.b.get()}) {
    // One more: the other side may not have learned of the last end, and would learn of it by heartbeats.
    EXPECT_TRUE(pair.until([&] { return party->engine->statistics().peers <= PeerList::kMostResting + 1; }, 5));
    EXPECT_EQ(party->engine->peers().size(), party->engine->statistics().peers);
  }
  EXPECT_NE(pair.a->engine->peers().front().id, first);

  // What is meant for a forgotten one is refused, whatever was sent before.
  const uint64_t sent = pair.a->cookie();
  OpId op = 0;
  ASSERT_TRUE(pair.a->engine->submit_send(sent, first, "x", 1, &op).ok());
  EXPECT_EQ(pair.wait(*pair.a, sent).status.kind, StatusKind::kPeer);
  EXPECT_TRUE(disconnect(pair, *pair.a, first).ok());
  EXPECT_EQ(disconnect(pair, *pair.a, first + 10 * kRounds).code, StatusCode::kInvalidArgument);
  EXPECT_TRUE(write_one(pair, from, key).status.ok()) << "the next use of a key connects its owner again";
  EXPECT_EQ(target, source);
}

// A key outlives what was known of its owner. The memory of that entry is given to the next peer, which is somebody else.
TEST(LongLife, AKeyOfAForgottenPeerIsNotTakenForOneOfTheNext) {
  Pair pair(Pair::manual(plain()));
  Party third(pair.config);
  std::vector<uint8_t> source(64, 1), target(64, 0xee);
  const RegionId from = pair.add_region(*pair.a, source), to = pair.add_region(*pair.b, target);
  const KeyId key = pair.give_key(*pair.b, to, 64, *pair.a);
  const PeerId first = pair.connect(*pair.a, *pair.b);
  ASSERT_TRUE(write_one(pair, from, key).status.ok());
  ASSERT_TRUE(disconnect(pair, *pair.a, first).ok());
  while (pair.a->engine->peers().front().id == first)
    ASSERT_TRUE(disconnect(pair, *pair.a, pair.connect(*pair.a, *pair.b)).ok());
  const uint64_t met = pair.a->cookie();
  ASSERT_TRUE(pair.a->engine->submit_connect(met, third.engine->address()).ok());
  ASSERT_TRUE(pair.until([&] {
    third.engine->step();
    return pair.a->done.contains(met);
  }));
  const uint64_t write = pair.a->cookie();
  OpId op = 0;
  ASSERT_TRUE(pair.a->engine->submit_write(write, from, 0, 64, key, 0, kNoImm, &op).ok());
  ASSERT_TRUE(pair.until([&] {
    third.engine->step();
    return pair.a->done.contains(write);
  }));
  EXPECT_TRUE(pair.a->done[write].status.ok()) << "the next use of a key connects its owner again";
  EXPECT_EQ(target, source);
}

}  // namespace
}  // namespace asyncfabric::testing
