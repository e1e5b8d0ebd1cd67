// verbs_failure_test.cc: what goes wrong on a verbs rail and whom it harms: dead keys, silent peers, few receives, lost datagrams,
// hostile bytes, bad options. Two rails in one process, driven by hand.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "verbs_rig.h"

namespace asyncfabric::verbs_rig {
namespace {

bool untouched(const Side& side) {
  return std::all_of(side.region.begin(), side.region.end(), [](uint8_t x) { return x == 0xee; });
}

// INV-3: after revoke() no write with an old key lands or is counted, the connection goes on, and the new key works. Our own transfers out
// of that memory are not disturbed.
TEST(VerbsFailure, RevokedKeyIsRefusedAndTheLaneIsRebuilt) {
  NEED_VERBS();
  Side a(device_a(), {{"receives", "4"}}), b(device_b());
  Link link(a, b), back(b, a);
  link.post(link.write_imm(0, 0, 64, 1, 1), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.size() == 1 && a.done.size() == 1; }));
  // Nobody polls a, so it has receives for the first of these only: the others leave b's memory after its key died.
  for (uint64_t i = 0; i < 16; ++i) back.post(back.write_imm(0, 0, 5000, i, 2), {&b});
  std::string key;
  ASSERT_TRUE(b.rail->revoke_memory(*b.memory, kPatience, &key).ok());
  EXPECT_NE(key, b.key);
  EXPECT_LT(b.done.size(), 16u) << "nothing was under way while the key died";
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.done.size() == 16; }));
  EXPECT_EQ(b.failed(), 0u);
  std::fill(b.region.begin(), b.region.end(), 0xee);
  fill(a.region, 3);
  uint64_t tag = 100;
  uint32_t signals = 0;
  for (const uint64_t length : {uint64_t{1}, uint64_t{4096}, uint64_t{200000}}) {
    link.post(link.write_imm(0, 0, length, ++tag, 66), {&a, &b});
    ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.back().first == tag; })) << length << " hangs";
    EXPECT_EQ(a.done.back().second.code, StatusCode::kStaleKey);
    EXPECT_EQ(a.done.back().second.raw, IBV_WC_REM_ACCESS_ERR);
    link.post(link.signal(++tag, 7), {&a, &b});
    ++signals;
    ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.back().first == tag; })) << "the connection does not go on";
    EXPECT_TRUE(a.done.back().second.ok());
  }
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.size() == 1 + signals; }));
  EXPECT_TRUE(untouched(b));
  EXPECT_EQ(std::count(b.imms.begin(), b.imms.end(), 66u), 0);
  ASSERT_TRUE(a.rail->attach(*link.peer, key, kPatience, &link.remote).ok());
  link.post(link.write_imm(0, 0, 200000, ++tag, 8), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.back() == 8u; }));
  EXPECT_EQ(std::memcmp(a.region.data(), b.region.data(), 200000), 0);
  EXPECT_EQ(a.figures().rebuilt_lanes, 3u);
}

// One bad request in a long queue: what was before it is good, itself is named, what was behind it failed or arrived but never without
// a word, no immediate comes without its data, and the other peers notice nothing.
TEST(VerbsFailure, RefusedWriteNeverLosesOthersSilently) {
  NEED_VERBS();
  Side a(device_a()), b(device_b()), c(device_b());
  Link good(a, b), other(a, c);
  verbs::MemoryKey forged;
  ASSERT_TRUE(verbs::parse(b.key, &forged));
  forged.rkey ^= 0x5500;
  std::unique_ptr<RemoteMemory> wrong;
  ASSERT_TRUE(a.rail->attach(*good.peer, verbs::encode(forged), kPatience, &wrong).ok());
  for (uint32_t round = 1; round <= 20; ++round) {
    std::fill(b.region.begin(), b.region.end(), 0);
    std::fill(a.region.begin(), a.region.end(), static_cast<uint8_t>(round));
    a.done.clear();
    b.imms.clear();
    c.imms.clear();
    b.on_imm = [&](uint32_t imm) { EXPECT_EQ(b.region[imm * 8192], static_cast<uint8_t>(round)); };
    for (uint32_t i = 0; i < 60; ++i) {
      WorkRequest request = good.write_imm(i * 8192, i * 8192, i % 2 == 0 ? 64 : 8192, i, i);
      if (i == 2 * round) request.remote = wrong.get();
      good.post(request, {&a, &b, &c});
      other.post(other.signal(1000 + i, i), {&a, &b, &c});
    }
    ASSERT_TRUE(pump_until({&a, &b, &c}, [&] { return a.done.size() == 120 && c.imms.size() == 60; })) << round;
    for (const auto& [tag, status] : a.done) {
      if (tag >= 1000 || tag < 2 * round) { EXPECT_TRUE(status.ok()) << tag << " " << status_text(status.code); }
      if (tag == 2 * round) { EXPECT_EQ(status.code, StatusCode::kStaleKey); }
      if (!status.ok()) continue;
      ASSERT_TRUE(tag >= 1000 || pump_until({&a, &b},
                                            [&, tag = tag] {
                                              return std::count(b.imms.begin(), b.imms.end(),
                                                                static_cast<uint32_t>(tag)) == 1;
                                            }))
          << "reported as done, never arrived";
    }
    EXPECT_EQ(b.imms.size() + a.failed(), 60u) << "failed and counted all the same";
  }
}

TEST(VerbsFailure, RangesAndRightsAreCheckedAtTheWriter) {
  NEED_VERBS();
  Side a(device_a()), b(device_b(), {}, 1 << 20, kAccessRemoteRead);
  Link link(a, b);
  const std::string long_text(20000, 'x');
  const std::vector<WorkRequest> bad = {link.write(0, 0, 64, 1), link.write(0, ~0ull, 2, 2),
                                        link.write(0, 1 << 20, 1, 3), link.write((1 << 20) - 1, 0, 2, 4),
                                        link.message(long_text, 5)};
  for (const WorkRequest& request : bad) {
    link.post(request, {&a, &b});
    ASSERT_TRUE(pump_until({&a, &b}, [&] { return !a.done.empty() && a.done.back().first == request.tag; }));
    EXPECT_FALSE(a.done.back().second.ok());
  }
  EXPECT_EQ(a.done[0].second.code, StatusCode::kAccessDenied);
  EXPECT_EQ(a.done[1].second.code, StatusCode::kOutOfBounds);
  EXPECT_EQ(a.done[2].second.code, StatusCode::kOutOfBounds);
  EXPECT_EQ(a.done[4].second.code, StatusCode::kInvalidArgument);
}

// A key that claims more than it has: the device of the target refuses it.
TEST(VerbsFailure, ForgedKeysTouchNothing) {
  NEED_VERBS();
  Side a(device_a()), b(device_b()), read_only(device_b(), {}, 1 << 20, kAccessRemoteRead);
  for (Side* target : {&b, &read_only}) {
    verbs::MemoryKey key;
    ASSERT_TRUE(verbs::parse(target->key, &key));
    key.length *= 2;
    key.access = kAccessRemoteWrite;
    Link forged(a, target->rail->address(), verbs::encode(key));
    std::fill(target->region.begin(), target->region.end(), 0xee);
    a.done.clear();
    forged.post(forged.write_imm(0, target == &b ? (1 << 20) - 32 : 0, 64, 1, 66000), {&a, &b, &read_only});
    ASSERT_TRUE(pump_until({&a, &b, &read_only}, [&] { return a.done.size() == 1; }));
    EXPECT_EQ(a.done[0].second.code, StatusCode::kStaleKey);
    EXPECT_TRUE(untouched(*target));
    EXPECT_TRUE(target->imms.empty());
  }
}

// Many immediates for few receives: the device of the sender waits and tries again, nothing is lost.
TEST(VerbsFailure, FewReceivesManyImmediates) {
  NEED_VERBS();
  Side a(device_a()), b(device_b(), {{"receives", "4"}});
  Link link(a, b);
  for (uint32_t i = 0; i < 400; ++i) link.post(link.write_imm(0, 0, 64, i, i), {&a});  // nobody polls b
  for (int pass = 0; pass < 100; ++pass) a.pump();
  EXPECT_LT(a.done.size(), 64u) << "there were more receives than asked for, so nothing was tested";
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.size() == 400 && a.done.size() == 400; }));
  EXPECT_EQ(a.failed(), 0u);
  for (uint32_t i = 0; i < 400; ++i) EXPECT_EQ(b.imms[i], i);
}

// Nobody lives at the address: other peers are served, the loss is reported once the patience is over.
TEST(VerbsFailure, PeerThatIsGone) {
  NEED_VERBS();
  Side a(device_a()), b(device_b());
  std::string address;
  {
    Side gone(device_b());
    address = gone.rail->address();
  }
  std::unique_ptr<RailPeer> peer;
  ASSERT_TRUE(a.rail->connect(address, kSecond / 2, &peer).ok());
  Link alive(a, b);
  const std::string text = "hello";
  WorkRequest hello = alive.message(text, 500);
  hello.peer = peer.get();
  EXPECT_EQ(a.rail->post({&hello, 1}).accepted, 1u);
  WorkRequest signal = alive.signal(501, 1);
  signal.peer = peer.get();
  EXPECT_EQ(a.rail->post({&signal, 1}).status.code, StatusCode::kBusy);
  for (uint32_t i = 0; i < 50; ++i) {
    alive.post(alive.signal(i, i), {&a, &b});
    ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.size() == i + 1; }));
  }
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.lost.size() == 1 && a.done.size() == 51; }));
  EXPECT_EQ(a.lost[0].first, peer.get());
  EXPECT_EQ(a.lost[0].second.code, StatusCode::kPeerUnreachable);
  EXPECT_EQ(a.rail->post({&signal, 1}).accepted, 1u);
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.size() == 52; }));
  EXPECT_FALSE(a.done.back().second.ok());
}

// The peer's rail goes while requests are under way to it: they come back by name, disconnect() gives back what is left at once.
TEST(VerbsFailure, PeerThatGoesAway) {
  NEED_VERBS();
  const Words fast = {{"timeout", "10"}, {"retry", "1"}};
  Side a(device_a(), fast), c(device_b());
  auto b = std::make_unique<Side>(device_b());
  Link link(a, *b), other(a, c);
  link.post(link.signal(1, 1), {&a, b.get()});
  ASSERT_TRUE(pump_until({&a, b.get()}, [&] { return b->imms.size() == 1 && a.done.size() == 1; }));
  b->rail.reset();
  a.done.clear();
  for (uint64_t i = 0; i < 40; ++i) link.post(link.write_imm(0, i * 4096, 4096, i, 1), {});
  for (uint32_t i = 0; i < 50; ++i) {
    other.post(other.signal(1000 + i, i), {&a, &c});
    ASSERT_TRUE(pump_until({&a, &c}, [&] { return c.imms.size() == i + 1; }))
        << "the living peer waits for the dead one";
  }
  EXPECT_EQ(a.failed(), 0u) << "a silent peer may live: what it was sent waits for a verdict";
  EXPECT_TRUE(a.rail->disconnect(*link.peer).ok());
  ASSERT_TRUE(pump_until({&a, &c}, [&] { return a.done.size() == 90; }));
  for (const auto& [tag, status] : a.done) EXPECT_EQ(status.code, tag < 1000 ? StatusCode::kPeerDead : StatusCode::kOk);
}

// A rail that took over an address is not the one that the address names.
TEST(VerbsFailure, RestartedPeerIsNotTakenForTheOldOne) {
  NEED_VERBS();
  Side a(device_a()), b(device_b());
  verbs::RailAddress address;
  ASSERT_TRUE(verbs::parse(b.rail->address(), &address));
  ++address.incarnation;
  std::unique_ptr<RailPeer> peer;
  ASSERT_TRUE(a.rail->connect(verbs::encode(address), kPatience, &peer).ok());
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.lost.size() == 1; }));
  EXPECT_EQ(a.lost[0].second.code, StatusCode::kPeerDead);
  EXPECT_EQ(a.lost[0].second.raw, ESTALE);
  std::unique_ptr<RemoteMemory> remote;
  EXPECT_EQ(a.rail->attach(*peer, b.key, kPatience, &remote).code, StatusCode::kStaleKey);
}

TEST(VerbsFailure, HandlesMayGoAtAnyTime) {
  NEED_VERBS();
  Side a(device_a()), b(device_b());
  for (int i = 0; i < 30; ++i) {
    Link link(a, b);
    if (i % 3 != 0) link.post(link.signal(static_cast<uint64_t>(i), 7), {&a, &b});
    if (i % 3 == 1) a.rail->disconnect(*link.peer);
    link.peer.reset();  // never disconnected when i % 3 is 0 or 2
  }
  Link last(a, b);
  last.post(last.signal(1000, 1000), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return !b.imms.empty() && b.imms.back() == 1000u; }));
}

TEST(VerbsFailure, HostileAddressesAndKeys) {
  NEED_VERBS();
  Side a(device_a()), b(device_b());
  Link link(a, b);
  std::mt19937 random(7);
  const std::string address = b.rail->address();
  std::unique_ptr<RailPeer> peer;
  std::unique_ptr<RemoteMemory> remote;
  for (size_t length = 0; length < address.size(); ++length)
    EXPECT_FALSE(a.rail->connect(address.substr(0, length), kSecond, &peer).ok());
  EXPECT_FALSE(a.rail->connect(address + "x", kSecond, &peer).ok());
  for (size_t length = 0; length < b.key.size(); ++length)
    EXPECT_FALSE(a.rail->attach(*link.peer, b.key.substr(0, length), kPatience, &remote).ok());
  EXPECT_FALSE(a.rail->attach(*link.peer, b.key + "x", kPatience, &remote).ok());
  for (int i = 0; i < 1000; ++i) {
    std::string key = b.key;
    for (int flips = 0; flips < 3; ++flips) key[random() % key.size()] ^= static_cast<char>(1u << random() % 8);
    (void)a.rail->attach(*link.peer, key, kPatience, &remote);
    std::string noise(random() % 130, '\0');
    for (char& byte : noise) byte = static_cast<char>(random());
    EXPECT_FALSE(a.rail->attach(*link.peer, noise, kPatience, &remote).ok());
    EXPECT_FALSE(a.rail->connect(noise, kSecond, &peer).ok());
  }
  link.post(link.signal(1, 1), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.size() == 1; }));
}

// ---- without a device

TEST(VerbsWire, DatagramsSurviveTheTripAndNothingElseDoes) {
  verbs::Datagram sent;
  sent.kind = verbs::DatagramKind::kReply;
  sent.target = 0x1122334455667788;
  sent.connection = 42;
  sent.attempt = 3;
  sent.lanes = 3;
  sent.ends = {verbs::QueueEnd{0x123456, 0xabcdef}, verbs::QueueEnd{7, 9}};
  sent.credits = 8;
  sent.sender.incarnation = 5;
  sent.sender.mtu = 5;
  sent.sender.qpn = 0x11;
  sent.sender.qkey = 0x7fffffff;
  const std::string bytes = verbs::encode(sent);
  ASSERT_LE(bytes.size(), verbs::kMaxDatagramBytes);
  verbs::Datagram got;
  ASSERT_TRUE(verbs::parse(bytes, &got));
  EXPECT_EQ(verbs::encode(got), bytes);
  EXPECT_EQ(got.ends[0].psn, 0xabcdefu);
  EXPECT_EQ(got.credits, 8);
  for (size_t length = 0; length < bytes.size(); ++length) EXPECT_FALSE(verbs::parse(bytes.substr(0, length), &got));
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    std::string damaged = bytes;
    damaged[bit / 8] ^= static_cast<char>(1u << bit % 8);
    EXPECT_FALSE(verbs::parse(damaged, &got)) << bit;
  }
}

Status open_with(const std::string& device, const Words& options, std::string* detail) {
  std::unique_ptr<Rail> rail;
  RailSpec spec;
  spec.provider = "verbs";
  spec.device = device;
  spec.options = options;
  detail->clear();
  return open_verbs_rail(spec, &rail, detail);
}

TEST(VerbsOpen, RefusesWhatItDoesNotKnow) {
  std::string detail;
  for (const auto& option :
       {std::pair{"colour", "red"}, {"mtu", "1000"}, {"retry", "8"}, {"port", "0"}, {"depth", "lots"}}) {
    EXPECT_EQ(open_with("", {{option.first, option.second}}, &detail).code, StatusCode::kInvalidArgument);
    EXPECT_NE(detail.find(option.first), std::string::npos) << detail;
    EXPECT_NE(detail.find("traffic_class=0..255"), std::string::npos) << detail;
  }
  EXPECT_EQ(open_with("", {{"library", "/nowhere/libibverbs.so.1"}}, &detail).code, StatusCode::kNoProvider);
  EXPECT_NE(detail.find("apt-get install libibverbs1"), std::string::npos) << detail;
  EXPECT_EQ(open_with("", {{"library", "libm.so.6"}}, &detail).code, StatusCode::kNoProvider);
  EXPECT_NE(detail.find("libm.so.6"), std::string::npos) << detail;
}

TEST(VerbsOpen, StatesThatThereIsNoDevice) {
  if (!devices().empty()) GTEST_SKIP() << "this machine has RDMA devices";
  std::string detail;
  EXPECT_EQ(open_with("", {}, &detail).code, StatusCode::kNoProvider);
  EXPECT_NE(detail.find("no RDMA device"), std::string::npos) << detail;
}

TEST(VerbsOpen, StatesWhichDevicesThereAre) {
  NEED_VERBS();
  std::string detail;
  EXPECT_EQ(open_with("nodevice0", {}, &detail).code, StatusCode::kNoProvider);
  EXPECT_NE(detail.find("nodevice0"), std::string::npos) << detail;
  EXPECT_NE(detail.find(device_a()), std::string::npos) << detail;
  EXPECT_EQ(open_with(device_a(), {{"port", "9"}}, &detail).code, StatusCode::kNoProvider);
  EXPECT_NE(detail.find("port 9"), std::string::npos) << detail;
  EXPECT_EQ(open_with(device_a(), {{"gid", "900"}}, &detail).code, StatusCode::kNoProvider);
  EXPECT_NE(detail.find("index 900"), std::string::npos) << detail;
}

}  // namespace
}  // namespace asyncfabric::verbs_rig
