// engine_path_test.cc: lanes and rails that fall silent and come back, over two loopback rails on each side: unposted work goes round, what
// cannot go round waits or fails by name, messages keep flowing.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

#include "engine/wire.h"
#include "rigs/engine_pair.h"

namespace asyncfabric::testing {
namespace {

constexpr size_t kSize = 1 << 20;

struct TwoRails : ::testing::Test {
  TwoRails()
      : pair(Pair::manual({"loopback", "", {{"burst", "4"}, {"depth", "4"}}}), 2, 2),
        source(kSize, 7),
        target(kSize, 0) {
    for (const auto& [number, rail] : LoopbackHub::shared().rails) rails.push_back(rail);  // a0 a1 b0 b1
    from = pair.add_region(*pair.a, source);
    key = pair.give_key(*pair.b, pair.add_region(*pair.b, target), kSize, *pair.a);
    uint32_t imm = 0;
    EXPECT_TRUE(pair.b->engine->open_counter(5, &counter, &imm).ok());
    EXPECT_TRUE(pair.wait(*pair.a, write(64)).status.ok());  // connected, the key is attached
  }
  ~TwoRails() override {
    for (LoopbackRail* rail : rails) rail->hold(false);
  }

  uint64_t write(uint64_t length) {
    const uint64_t cookie = pair.a->cookie();
    OpId op = 0;
    EXPECT_TRUE(pair.a->engine->submit_write(cookie, from, 0, length, key, 0, 5, &op).ok());
    return cookie;
  }
  void turns(int count) {
    for (int i = 0; i < count; ++i) pair.turn();
  }

  Pair pair;
  std::vector<uint8_t> source, target;
  std::vector<LoopbackRail*> rails;
  RegionId from = 0;
  KeyId key = 0;
  CounterId counter = 0;
};

TEST_F(TwoRails, NewWorkAvoidsAPathThatIsDownAndComesBack) {
  rails[0]->raise(RailEventKind::kPathDown);
  turns(2);
  const uint64_t before = rails[0]->posted();
  for (int i = 0; i < 8; ++i) EXPECT_TRUE(pair.wait(*pair.a, write(kSize)).status.ok());
  EXPECT_EQ(rails[0]->posted(), before);
  rails[0]->raise(RailEventKind::kPathUp);
  turns(2);
  EXPECT_TRUE(pair.wait(*pair.a, write(kSize)).status.ok());
  EXPECT_GT(rails[0]->posted(), before);
  EXPECT_TRUE(pair.until([&] { return pair.b->engine->counter_value(counter) == 10; }));
}

// The first rail holds the 4 requests that fit, the rest of its share waits in the engine when the path falls silent: that goes over the
// other rail, what is held is reported when the rail knows.
TEST_F(TwoRails, UnpostedWorkGoesRoundAndNothingIsCountedTwice) {
  rails[0]->hold(true);
  std::vector<uint64_t> cookies;
  for (int i = 0; i < 40; ++i) cookies.push_back(write(64));
  const auto finished = [&] {
    return std::count_if(cookies.begin(), cookies.end(),
                         [&](uint64_t cookie) { return pair.a->done.contains(cookie); });
  };
  turns(50);
  EXPECT_EQ(rails[0]->queued(), 4u);
  EXPECT_EQ(finished(), 20);
  rails[0]->raise(RailEventKind::kPathDown);
  EXPECT_TRUE(pair.until([&] { return finished() == 36; }, 2));
  EXPECT_TRUE(pair.until([&] { return pair.b->engine->counter_value(counter) == 37; }, 2));
  rails[0]->hold(false);
  for (const uint64_t cookie : cookies) EXPECT_TRUE(pair.wait(*pair.a, cookie).status.ok());
  turns(50);
  EXPECT_EQ(pair.b->engine->counter_value(counter), 41u);
}

TEST_F(TwoRails, WithoutAnotherWayWorkWaits) {
  for (LoopbackRail* rail : {rails[0], rails[1]}) {
    rail->hold(true);
    rail->raise(RailEventKind::kPathDown);
  }
  turns(2);
  const uint64_t cookie = write(kSize);
  turns(50);
  EXPECT_FALSE(pair.a->done.contains(cookie)) << "a path that is being mended is no reason to fail";
  for (LoopbackRail* rail : {rails[0], rails[1]}) {
    rail->hold(false);
    rail->raise(RailEventKind::kPathUp);
  }
  EXPECT_TRUE(pair.wait(*pair.a, cookie).status.ok());
}

// The last part of a split write is reported after its rail went down: the count of the whole goes over the other rail.
TEST_F(TwoRails, TheCountOfASplitWriteGoesRound) {
  for (const RailEventKind kind : {RailEventKind::kPathDown, RailEventKind::kRailDown}) {
    rails[0]->hold(true);
    const uint64_t before = rails[0]->posted();
    const uint64_t counted = pair.b->engine->counter_value(counter);
    const uint64_t cookie = write(kSize);
    turns(20);
    ASSERT_EQ(rails[0]->posted(), before + 1) << "one part each";
    ASSERT_FALSE(pair.a->done.contains(cookie));
    rails[0]->raise(kind);
    rails[0]->hold(false);
    EXPECT_TRUE(pair.wait(*pair.a, cookie).status.ok());
    EXPECT_TRUE(pair.until([&] { return pair.b->engine->counter_value(counter) == counted + 1; }));
    EXPECT_EQ(rails[0]->posted(), before + 1);
    rails[0]->raise(kind == RailEventKind::kPathDown ? RailEventKind::kPathUp : RailEventKind::kRailUp);
    turns(2);
  }
}

TEST_F(TwoRails, TheCountOfASplitWriteFailsByNameWithoutAnyRail) {
  rails[0]->hold(true);
  const uint64_t cookie = write(kSize);
  turns(20);
  rails[1]->raise(RailEventKind::kRailDown);
  turns(2);
  rails[0]->raise(RailEventKind::kRailDown);
  rails[0]->hold(false);
  EXPECT_EQ(pair.wait(*pair.a, cookie).status.code, StatusCode::kRailDown);
}

// A batch of which some pages left: the rest goes round as soon as those are known to have arrived, and is counted in full.
TEST_F(TwoRails, TheRestOfABatchGoesRound) {
  rails[0]->hold(true);
  rails[1]->raise(RailEventKind::kPathDown);  // all of the batch goes to the first rail
  turns(2);
  std::vector<int64_t> source_pages, target_pages;
  for (int64_t i = 0; i < 20; ++i) {
    source_pages.push_back(i * 2);
    target_pages.push_back(40 - i * 2);
  }
  PageBatch batch;
  batch.source_pages = source_pages.data();
  batch.target_pages = target_pages.data();
  batch.count = 20;
  batch.page_bytes = batch.source_stride = batch.target_stride = 4096;
  const uint64_t cookie = pair.a->cookie();
  const uint64_t before = rails[0]->posted();
  OpId op = 0;
  ASSERT_TRUE(pair.a->engine->submit_write_pages(cookie, from, key, batch, 5, &op, 0).ok());
  turns(5);
  ASSERT_EQ(rails[0]->posted(), before + 4) << "as many as fit";
  rails[1]->raise(RailEventKind::kPathUp);
  rails[0]->raise(RailEventKind::kPathDown);
  turns(5);
  rails[0]->hold(false);
  EXPECT_TRUE(pair.wait(*pair.a, cookie).status.ok());
  EXPECT_EQ(rails[0]->posted(), before + 4) << "more went into a path that is down";
  EXPECT_TRUE(pair.until([&] { return pair.b->engine->counter_value(counter) == 21; }));
}

TEST_F(TwoRails, MessagesGoRoundARailThatIsDown) {
  for (const RailEventKind kind : {RailEventKind::kPathDown, RailEventKind::kRailDown}) {
    rails[0]->raise(kind);
    turns(2);
    rails[0]->hold(true);  // whatever went there would wait for ever
    // A new key: its owner is asked, by a message, before the first use.
    std::vector<uint8_t> more(4096, 1);
    const KeyId fresh = pair.give_key(*pair.b, pair.add_region(*pair.b, more), 4096, *pair.a);
    const uint64_t cookie = pair.a->cookie();
    OpId op = 0;
    ASSERT_TRUE(pair.a->engine->submit_write(cookie, from, 0, 64, fresh, 0, 5, &op).ok());
    EXPECT_TRUE(pair.wait(*pair.a, cookie).status.ok());
    const uint64_t sent = pair.a->cookie();
    const std::string payload = "hello";
    ASSERT_TRUE(pair.a->engine->submit_send(sent, pair.a->engine->peers().at(0).id, payload.data(), 5, &op).ok());
    EXPECT_TRUE(pair.wait(*pair.a, sent).status.ok());
    rails[0]->hold(false);
    rails[0]->raise(kind == RailEventKind::kPathDown ? RailEventKind::kPathUp : RailEventKind::kRailUp);
    turns(2);
  }
}

TEST_F(TwoRails, WhyMemoryOfAPeerCannotBeReachedIsReported) {
  std::vector<uint8_t> more(4096, 1);
  const KeyId fresh = pair.give_key(*pair.b, pair.add_region(*pair.b, more), 4096, *pair.a);
  rails[1]->refuse("rail 1 has no way to that memory");
  std::vector<uint64_t> cookies;
  OpId op = 0;
  for (int write = 0; write < 70; ++write) {
    cookies.push_back(pair.a->cookie());
    ASSERT_TRUE(pair.a->engine->submit_write(cookies.back(), from, 0, 64, fresh, 0, kNoImm, &op).ok());
    EXPECT_EQ(pair.wait(*pair.a, cookies.back()).status.code, StatusCode::kUnsupported);
  }
  EXPECT_EQ(pair.a->engine->reason(cookies.back()), "rail 1 has no way to that memory");
  EXPECT_EQ(pair.a->engine->reason(cookies[6]), "rail 1 has no way to that memory");
  EXPECT_EQ(pair.a->engine->reason(cookies[5]), "") << "the newest 64 are kept";
  rails[1]->refuse("");
  const uint64_t again = pair.a->cookie();
  ASSERT_TRUE(pair.a->engine->submit_write(again, from, 0, 64, fresh, 0, kNoImm, &op).ok());
  EXPECT_TRUE(pair.wait(*pair.a, again).status.ok());
  EXPECT_EQ(pair.a->engine->reason(again), "");
}

// Half of the heartbeats go where nothing comes back; the others keep the peer alive.
TEST(Pulse, ALaneThatSwallowsEverythingIsNoDeath) {
  EngineConfig config;
  config.rails = {{"loopback", "", {{"loss", "0"}}}};
  config.peer_deadline_host_ns = config.peer_deadline_network_ns = 500'000'000;
  const uint64_t first = LoopbackHub::shared().next_rail;
  Pair pair(config, 2, 2);
  std::vector<LoopbackRail*> rails;
  for (const auto& [number, rail] : LoopbackHub::shared().rails)
    if (number >= first) rails.push_back(rail);  // a0 a1 b0 b1
  std::vector<uint8_t> source(64, 7), target(64, 0);
  const RegionId from = pair.add_region(*pair.a, source);
  const KeyId key = pair.give_key(*pair.b, pair.add_region(*pair.b, target), 64, *pair.a);
  const uint64_t cookie = pair.a->cookie();
  OpId op = 0;
  ASSERT_TRUE(pair.a->engine->submit_write(cookie, from, 0, 64, key, 0, kNoImm, &op, 0).ok());
  ASSERT_TRUE(pair.wait(*pair.a, cookie).status.ok());
  const auto state = [&] { return pair.a->engine->peers().at(0).state; };
  for (const size_t dead : {0, 1}) {
    rails[dead]->hold(true);
    rails[2 + dead]->hold(true);
    const uint64_t sent = rails[3 - dead]->posted();  // by the other end, over the other lane
    EXPECT_TRUE(pair.until([&] { return state() != 1 || rails[3 - dead]->posted() >= sent + 6; }, 60));
    EXPECT_EQ(state(), 1u) << "only lane " << dead << " is silent";
    rails[dead]->hold(false);
    rails[2 + dead]->hold(false);
  }
}

// A rail on whose other end nothing of ours arrives yet, as while a loaded machine sets up our own connection to who connected to us.
struct OneWay : ::testing::Test {
  static EngineConfig config(uint64_t connect_deadline_ns) {
    EngineConfig config;
    config.rails = {{"loopback", "", {{"loss", "0"}}}};
    config.peer_deadline_host_ns = config.peer_deadline_network_ns = 50'000'000;
    config.connect_deadline_ns = connect_deadline_ns;
    return config;
  }
  void meet(uint64_t connect_deadline_ns) {
    const uint64_t first = LoopbackHub::shared().next_rail;
    pair.emplace(config(connect_deadline_ns));
    here = LoopbackHub::shared().rails.at(first + 1);
    here->hold(true);
    cookie = pair->a->cookie();
    ASSERT_TRUE(pair->a->engine->submit_connect(cookie, pair->b->engine->address()).ok());
    ASSERT_TRUE(pair->until([&] { return !pair->b->engine->peers().empty() && state() == 1; }));
  }
  uint32_t state() const { return pair->b->engine->peers().at(0).state; }

  std::optional<Pair> pair;
  LoopbackRail* here = nullptr;
  uint64_t cookie = 0;
};

TEST_F(OneWay, SilenceBeforeTheConnectionStandsIsNoDeath) {
  meet(60'000'000'000);
  const uint64_t sent = here->posted();  // five heartbeats in each deadline
  EXPECT_TRUE(pair->until([&] { return state() != 1 || here->posted() >= sent + 20; }, 60));
  EXPECT_EQ(state(), 1u) << "the other end lives, and could not answer yet";
  here->hold(false);
  EXPECT_TRUE(pair->wait(*pair->a, cookie).status.ok());
}

TEST_F(OneWay, SilenceCountsWhenSetUpIsOver) {
  meet(200'000'000);
  EXPECT_TRUE(pair->until([&] {
    return std::any_of(pair->b->others.begin(), pair->b->others.end(),
                       [](const Completion& c) { return c.kind == CompletionKind::kPeerLost; });
  }));
  here->hold(false);
}

// A fabric that connects from then on needs the newest address; to those that are connected the rail reports it.
TEST(EngineTest, ARailThatComesBackElsewhereIsInTheAddress) {
  Pair pair(Pair::manual({"loopback", "", {}}));
  LoopbackRail& rail = *LoopbackHub::shared().rails.begin()->second;
  Party& owner = *pair.a;
  const std::string before = owner.engine->address();
  rail.move("loop elsewhere");
  rail.raise(RailEventKind::kRailDown);
  owner.engine->step();
  EXPECT_EQ(owner.engine->address(), before);
  rail.raise(RailEventKind::kRailUp);
  owner.engine->step();
  AddressBlob blob;
  ASSERT_TRUE(decode_address(owner.engine->address(), &blob));
  EXPECT_EQ(blob.rails.at(0).address, "loop elsewhere");
  EXPECT_EQ(blob.incarnation, owner.engine->incarnation());
}

}  // namespace
}  // namespace asyncfabric::testing
