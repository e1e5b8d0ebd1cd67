// verbs_reopen_test.cc: a device that fails under its rail, over a library that this test replaces (replaced_port.h): the rail is closed by name, the
// device is opened again, and peers go on with the connections and keys that they have. Not run on a real mlx5.
#include <cerrno>
#include <cstring>

#include "replaced_port.h"

namespace asyncfabric::verbs_rig {
namespace {

// Two rails of one machine; the device of `a` is the one that fails.
struct Reopened : ReplacedPort {
  Reopened() {
    options.reopen_ms = 1;
    here = this;
    a = make();
    b = make();
    to_b = std::make_unique<Link>(*a, *b);
    to_a = std::make_unique<Link>(*b, *a);
    both(0x11);
  }
  std::unique_ptr<Side> make() const {
    const auto open = [](const RailSpec&, std::unique_ptr<Rail>* out, std::string* detail) {
      return here->open_rail(out, detail);
    };
    return std::make_unique<Side>("", Words(), 4096, kAccessRemoteWrite | kAccessRemoteRead, open);
  }
  bool pump(const std::function<bool()>& condition) { return pump_until({a.get(), b.get()}, condition); }
  // A counted write each way, with the keys of the beginning.
  void both(uint8_t value) {
    for (Side* side : {a.get(), b.get()}) {
      std::memset(side->region.data(), value, 100);
      side->imms.clear();
      side->done.clear();
    }
    to_b->post(to_b->write_imm(0, 1000, 100, 1, 7), {a.get(), b.get()});
    to_a->post(to_a->write_imm(0, 2000, 100, 2, 8), {a.get(), b.get()});
    EXPECT_TRUE(pump([&] { return !a->imms.empty() && !b->imms.empty() && !a->done.empty() && !b->done.empty(); }));
    EXPECT_EQ(b->region[1000], value);
    EXPECT_EQ(a->region[2099], value);
    EXPECT_EQ(a->failed() + b->failed(), 0u);
  }
  void fail() {
    library->happens(IBV_EVENT_DEVICE_FATAL, 1);
    EXPECT_TRUE(pump([&] { return a->downs == 1; }));
  }
  // Both lanes of both connections are built again.
  void wait_until_open(size_t times = 1) {
    EXPECT_TRUE(pump([&] {
      return a->ups + b->ups == times && a->figures().rebuilt_lanes == 2 * times &&
             b->figures().rebuilt_lanes == 2 * times;
    }));
  }
  bool states(const std::string& text) const { return a->rail->info().version.find(text) != std::string::npos; }

  static Reopened* here;
  std::unique_ptr<Side> a, b;
  std::unique_ptr<Link> to_a, to_b;
};
Reopened* Reopened::here = nullptr;

TEST_F(Reopened, ConnectionsAndKeysGoOn) {
  const std::string address = a->rail->address();
  library->refused_openings = 3;
  fail();
  EXPECT_TRUE(states("failed, trying to open it again") || states("opened again")) << a->rail->info().version;
  wait_until_open();
  EXPECT_TRUE(states("opened again after failures: 1")) << a->rail->info().version;
  EXPECT_EQ(library->openings.load(), 2u + 3 + 1);
  EXPECT_EQ(library->left.load(), 0u) << "objects were in the device when it was closed";
  both(0x22);
  EXPECT_TRUE(pump([&] { return !a->path_down && !b->path_down; }));
  EXPECT_NE(a->rail->address(), address);
  Link anew(*b, *a);
  anew.post(anew.write_imm(0, 3000, 10, 3, 9), {a.get(), b.get()});
  EXPECT_TRUE(pump([&] { return a->imms.size() == 2; }));
}

TEST_F(Reopened, HappensAgain) {
  for (size_t time = 1; time <= 3; ++time) {
    // The first context is that of the rail that was opened longest ago, so that they fail in turn.
    library->happens(IBV_EVENT_DEVICE_FATAL, 1);
    wait_until_open(time);
    both(static_cast<uint8_t>(0x30 + time));
  }
  EXPECT_EQ(library->left.load(), 0u);
}

// The dead device took it and reports nothing: it ends by name, and does not come later.
TEST_F(Reopened, WhatTheDeadDeviceTookEndsByName) {
  library->refused_openings = 1;
  library->happens(IBV_EVENT_DEVICE_FATAL, 1);
  const WorkRequest lost = to_b->write_imm(0, 1000, 100, 5, 7);
  a->done.clear();
  ASSERT_EQ(a->rail->post({&lost, 1}).accepted, 1u);
  EXPECT_TRUE(pump([&] { return !a->done.empty(); }));
  EXPECT_EQ(a->done.at(0).first, 5u);
  EXPECT_EQ(a->done.at(0).second.code, StatusCode::kRailDown);
  EXPECT_EQ(a->done.at(0).second.raw, IBV_EVENT_DEVICE_FATAL);
  wait_until_open();
  both(0x44);
  EXPECT_EQ(b->imms.size(), 1u);
}

// Messages have numbers of the engine's, so they are kept: those that the device took, and those that come while there is none.
TEST_F(Reopened, MessagesLeaveWhenItIsOpen) {
  library->refused_openings = 5;
  library->happens(IBV_EVENT_DEVICE_FATAL, 1);
  const std::string one = "one", two = "two";
  to_b->post(to_b->message(one, 10), {a.get()});
  EXPECT_TRUE(pump([&] { return a->downs == 1; }));
  to_b->post(to_b->message(two, 11), {a.get()});
  EXPECT_TRUE(pump([&] { return b->messages.size() == 2; }));
  EXPECT_EQ(b->messages, (std::vector<std::string>{one, two}));
}

// INV-3: a key that was revoked while the device was away has no number in its next life.
TEST_F(Reopened, ARevokedKeyStaysDead) {
  library->refused_openings = 2;
  fail();
  std::string key;
  ASSERT_TRUE(a->rail->revoke_memory(*a->memory, 0, &key).ok());
  std::vector<uint8_t> other(4096);
  std::unique_ptr<LocalMemory> memory;
  std::string other_key;
  ASSERT_TRUE(a->rail->register_memory({other.data(), other.size(), kHostDevice, -1, 3}, &memory, &other_key).ok());
  wait_until_open();
  std::memset(a->region.data(), 0, 4096);
  b->done.clear();
  to_a->post(to_a->write(0, 2000, 100, 20), {a.get(), b.get()});
  EXPECT_TRUE(pump([&] { return !b->done.empty(); }));
  EXPECT_EQ(b->done.at(0).second.code, StatusCode::kStaleKey);
  EXPECT_TRUE(rail_rig::untouched(a->region, 0, 4096, 0));
  for (const std::string& good : {key, other_key}) {
    Link link(*b, a->rail->address(), good);
    b->done.clear();
    link.post(link.write(0, 0, 100, 21), {a.get(), b.get()});
    EXPECT_TRUE(pump([&] { return !b->done.empty(); }));
    EXPECT_TRUE(b->done.at(0).second.ok());
  }
  EXPECT_EQ(other[99], 0x11);
  EXPECT_TRUE(a->rail->release_memory(memory, 0).ok());
}

// Who knows the rails' addresses, and not the number of the connection, cannot lead it elsewhere.
TEST_F(Reopened, AStrangerMovesNobody) {
  verbs::RailAddress known, target;
  ASSERT_TRUE(verbs::parse(a->rail->address(), &known));
  ASSERT_TRUE(verbs::parse(b->rail->address(), &target));
  const auto stranger = make();
  verbs::RailAddress false_one;
  ASSERT_TRUE(verbs::parse(stranger->rail->address(), &false_one));
  false_one.incarnation = known.incarnation;
  false_one.life = known.life + 1;
  verbs::Datagram moved;
  moved.kind = verbs::DatagramKind::kMoved;
  moved.target = target.incarnation;
  moved.connection = 1;
  moved.sender = false_one;
  library->datagram(target.qpn, target.qkey, verbs::encode(moved).data(), verbs::encode(moved).size());
  both(0x55);
  EXPECT_FALSE(b->path_down);
}

TEST_F(ReplacedPort, AFailedDeviceClosesTheRailByName) {
  options.reopen_ms = 1;
  open();
  library->refused_openings = ~0u;
  library->happens(IBV_EVENT_DEVICE_FATAL, 1);
  const RailEvent event = next();
  EXPECT_EQ(event.kind, RailEventKind::kRailDown);
  EXPECT_EQ(event.status.raw, IBV_EVENT_DEVICE_FATAL);
  const uint64_t until = now_ns() + 20 * kSecond;  // on the service thread, the second of them after 2 ms
  while (library->openings < 3 && now_ns() < until) {}
  EXPECT_GE(library->openings.load(), 3u);
  EXPECT_TRUE(states("the device failed")) << rail->info().version;
  rail.reset();
  EXPECT_EQ(library->left.load(), 0u);
}

// The credits of so many peers have room in the completion queue; one more is refused by name.
TEST_F(ReplacedPort, HasRoomForTheCreditsOfAllPeersThatItTakes) {
  open();
  EXPECT_GE(library->largest_queue.load(), verbs::kMaxPeers * (verbs::kCreditReceives + verbs::kCreditSends));
  verbs::RailAddress nobody;
  ASSERT_TRUE(verbs::parse(rail->address(), &nobody));
  nobody.qpn = 0xffffff;
  std::vector<std::unique_ptr<RailPeer>> peers(verbs::kMaxPeers + 1);
  for (auto& peer : peers) ASSERT_TRUE(rail->connect(verbs::encode(nobody), 100 * kSecond, &peer).ok());
  const RailEvent event = next();
  EXPECT_EQ(event.kind, RailEventKind::kPeerLost);
  EXPECT_EQ(event.peer, peers.back().get());
  EXPECT_EQ(event.status.code, StatusCode::kPeerRejected);
  EXPECT_EQ(event.status.raw, ENOSPC);
}

}  // namespace
}  // namespace asyncfabric::verbs_rig
