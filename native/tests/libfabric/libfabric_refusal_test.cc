// libfabric_refusal_test.cc: what a rail refuses: stale and foreign keys, hostile bytes, bad options, missing hardware. Nothing of
// it may touch memory, crash, or stop other work.
#include "libfabric_pair.h"

#include <signal.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <random>
#include <set>

#include "providers/libfabric/peers/wire.h"

namespace asyncfabric::testing {
namespace {

using libfabric::MemoryKey;
using libfabric::RailAddress;

class LibfabricRefusal : public ::testing::TestWithParam<const char*> {
 protected:
  RailSpec spec() const { return spec_of(GetParam()); }
  void SetUp() override {
    if (const std::string reason = missing(spec()); !reason.empty()) GTEST_SKIP() << reason;
  }
};

bool untouched(const Side& side) {
  return std::all_of(side.region.begin(), side.region.end(), [](uint8_t x) { return x == 0xee; });
}

// Behind requests that wait for a connection stand some that failed at once: whoever disconnects ends each of them once, and no other.
TEST_P(LibfabricRefusal, DisconnectingEndsWhatFailedBehindWhatWaits) {
  Side a(spec()), b(spec());
  Link link(a, b);
  std::vector<WorkRequest> batch;
  for (uint64_t tag = 1; tag <= 8; tag += 2) {
    batch.push_back(link.signal(tag, 7));
    batch.push_back(link.write(0, ~0ull, 2, tag + 1));
  }
  ASSERT_EQ(a.rail->post(batch).accepted, batch.size());
  (void)a.rail->disconnect(*link.peer);
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.size() >= batch.size(); }));
  std::set<uint64_t> ended;
  for (const auto& [tag, status] : a.done) {
    EXPECT_TRUE(ended.insert(tag).second) << tag << " ended twice";
    if (tag % 2 == 0) { EXPECT_FALSE(status.ok()) << tag; }
  }
}

// INV-3: after revoke() no write with an old key lands or is counted, the link goes on, and the new key works.
TEST_P(LibfabricRefusal, RevokedKey) {
  Side a(spec()), b(spec());
  Link link(a, b);
  link.post(link.write_imm(0, 0, 64, 1, 1), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.size() == 1 && a.done.size() == 1; }));
  std::string key;
  ASSERT_TRUE(while_pumping(a, [&] { return b.rail->revoke_memory(*b.memory, kPatience, &key); }).ok());
  EXPECT_NE(key, b.key);
  std::fill(b.region.begin(), b.region.end(), 0xee);
  fill(a.region, 3);
  uint64_t tag = 100;
  for (const uint64_t length : {uint64_t{1}, uint64_t{64}, uint64_t{4096}, uint64_t{5000}, uint64_t{200000}}) {
    for (const bool delivered : {false, true}) {
      WorkRequest stale = link.write_imm(0, 0, length, ++tag, 66);
      stale.delivered = delivered;
      link.post(stale, {&a, &b});
      ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.back().first == tag; })) << length << " hangs";
      const StatusKind kind = a.done.back().second.kind;  // verbs names the refusal, sockets only see a hang-up
      EXPECT_TRUE(kind == StatusKind::kTransfer || kind == StatusKind::kStale)
          << status_text(a.done.back().second.code);
      link.post(link.signal(++tag, 7), {&a, &b});
      ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.back().first == tag; })) << "the link does not go on";
      EXPECT_TRUE(a.done.back().second.ok());
    }
  }
  EXPECT_TRUE(untouched(b));
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.size() == 11; }));
  EXPECT_EQ(std::count(b.imms.begin(), b.imms.end(), 66u), 0);
  ASSERT_TRUE(a.rail->attach(*link.peer, key, kPatience, &link.remote).ok());
  link.post(link.write_imm(0, 0, 200000, ++tag, 8), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.back() == 8u; }));
  EXPECT_EQ(std::memcmp(a.region.data(), b.region.data(), 200000), 0);
}

// A write that is refused must not take along what was posted behind it without a word: each request either arrived or failed,
// and an immediate never comes without the data before it (INV-1), although libfabric reconnects by itself.
TEST_P(LibfabricRefusal, RefusedWriteNeverLosesOthersSilently) {
  Side a(spec()), b(spec());
  Link good(a, b);
  MemoryKey forged;
  ASSERT_TRUE(libfabric::parse(b.key, &forged));
  forged.key ^= 0x5555;
  Link bad(a, b.rail->address(), libfabric::encode(forged));
  std::unique_ptr<RemoteMemory> wrong;
  ASSERT_TRUE(a.rail->attach(*good.peer, libfabric::encode(forged), kPatience, &wrong).ok());
  good.post(good.signal(0, 0), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.size() == 1 && a.done.size() == 1; }));
  uint32_t failed_rounds = 0;
  for (uint32_t round = 1; round <= 40; ++round) {
    std::fill(b.region.begin(), b.region.end(), 0);
    std::fill(a.region.begin(), a.region.end(), static_cast<uint8_t>(round));
    a.done.clear();
    b.imms.clear();
    std::vector<WorkRequest> batch;
    for (uint32_t i = 0; i < 60; ++i) {
      batch.push_back(good.write(i * 8192, i * 8192, i % 2 == 0 ? 64 : 8192, i));
      batch.back().signalled = i == 59;
      if (i == 59) batch.back().has_imm = true, batch.back().imm = round;
      if (i == round) batch.back().remote = wrong.get();
    }
    b.on_imm = [&](uint32_t) {
      for (uint32_t i = 0; i < 60; ++i) {
        EXPECT_EQ(b.region[i * 8192], static_cast<uint8_t>(i == round ? 0 : round))
            << "counted without its data: " << i;
      }
    };
    size_t posted = 0;
    while (posted < batch.size()) {  // in pieces, so that some meet the broken stream and some the new one
      const size_t piece = std::min<size_t>(7, batch.size() - posted);
      const PostResult result = a.rail->post({batch.data() + posted, piece});
      posted += result.accepted;
      const bool busy = result.accepted < piece;  // the stream broke, and the target has not shown yet that it lives
      if (busy) { ASSERT_EQ(result.status.code, StatusCode::kBusy); }
      if (busy || round % 3 == 0) a.pump();
      if (busy || round % 2 == 0) b.pump();
      if (std::any_of(a.done.begin(), a.done.end(), [](const auto& done) { return !done.second.ok(); }))
        break;  // as the engine does
    }
    bool last = posted == batch.size();
    ASSERT_TRUE(pump_until({&a, &b},
                           [&] {
                             return std::any_of(a.done.begin(), a.done.end(), [&](const auto& done) {
                               return last ? done.first == 59 : !done.second.ok();
                             });
                           }))
        << "round " << round;
    const auto final = std::find_if(a.done.begin(), a.done.end(), [](const auto& done) { return done.first == 59; });
    if (last && final->second.ok()) {
      ASSERT_TRUE(pump_until({&a, &b}, [&] { return !b.imms.empty(); })) << "reported as done, never arrived";
    }
    failed_rounds += std::any_of(a.done.begin(), a.done.end(), [](const auto& done) { return !done.second.ok(); });
    b.on_imm = nullptr;
    bool recovered = false;  // a signal posted before the break is known may still fail, but it must report that
    for (uint64_t tag = 1000; !recovered && tag < 1020; ++tag) {
      good.post(good.signal(tag, 0xffff), {&a, &b});
      ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.back().first == tag; })) << "round " << round;
      recovered = a.done.back().second.ok();
    }
    ASSERT_TRUE(recovered);
    ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.back() == 0xffff; }));
  }
  EXPECT_EQ(failed_rounds, 40u);  // the refused write itself was never reported as done
}

TEST_P(LibfabricRefusal, ForgedKeysTouchNothing) {
  Side keeper(spec());
  for (const int kind : {0, 1, 2}) {
    Side a(spec()), b(spec()), read_only(spec(), 1 << 20, kAccessRemoteRead);
    Side& target = kind == 2 ? read_only : b;
    MemoryKey key;
    ASSERT_TRUE(libfabric::parse(target.key, &key));
    if (kind == 0) key.key = ~key.key;
    if (kind == 1) key.length *= 2;
    if (kind == 2) key.access = kAccessRemoteWrite;
    Link forged(a, target.rail->address(), libfabric::encode(key));
    Link honest(keeper, target);
    std::fill(target.region.begin(), target.region.end(), 0xee);
    for (const uint64_t length : {uint64_t{64}, uint64_t{5000}, uint64_t{200000}})
      forged.post(forged.write_imm(0, kind == 1 ? (1 << 20) - 32 : 0, length, length, 66000), {&a, &target, &keeper});
    for (uint32_t i = 0; i < 300; ++i) {  // others are served while the forger is refused
      honest.post(honest.signal(i, i), {&a, &target, &keeper});
      ASSERT_TRUE(pump_until({&a, &target, &keeper}, [&] { return !target.imms.empty() && target.imms.back() == i; }))
          << kind;
    }
    EXPECT_TRUE(untouched(target)) << kind;
    EXPECT_EQ(std::count(target.imms.begin(), target.imms.end(), 66000u), 0);
  }
}

TEST_P(LibfabricRefusal, RangesAndRightsAreCheckedAtTheWriter) {
  Side a(spec()), b(spec(), 1 << 20, kAccessRemoteRead);
  Link link(a, b);
  const std::vector<WorkRequest> bad = {link.write(0, 0, 64, 1), link.write(0, ~0ull, 2, 2),
                                        link.write(0, 1 << 20, 1, 3), link.write((1 << 20) - 1, 0, 2, 4),
                                        link.message(std::string(20000, 'x'), 5)};
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

TEST_P(LibfabricRefusal, HostileAddressesAndKeys) {
  Side a(spec()), b(spec());
  Link link(a, b);
  std::mt19937 random(7);
  const std::string address = b.rail->address();
  std::unique_ptr<RailPeer> peer;
  std::unique_ptr<RemoteMemory> remote;
  for (size_t length = 0; length < address.size(); ++length)
    EXPECT_FALSE(a.rail->connect(address.substr(0, length), kSecond, &peer).ok());
  EXPECT_FALSE(a.rail->connect(address + "x", kSecond, &peer).ok());
  EXPECT_FALSE(a.rail->connect(std::string(4096, '\xff'), kSecond, &peer).ok());
  for (size_t length = 0; length < b.key.size(); ++length)
    EXPECT_FALSE(a.rail->attach(*link.peer, b.key.substr(0, length), kPatience, &remote).ok());
  EXPECT_FALSE(a.rail->attach(*link.peer, b.key + "x", kPatience, &remote).ok());
  for (int i = 0; i < 3000; ++i) {  // any bytes are refused or taken as a key; both without reading outside
    std::string key = b.key;
    for (int flips = 0; flips < 3; ++flips) key[random() % key.size()] ^= static_cast<char>(1u << random() % 8);
    (void)a.rail->attach(*link.peer, key, kPatience, &remote);
    std::string noise(random() % 130, '\0');
    for (char& byte : noise) byte = static_cast<char>(random());
    EXPECT_EQ(a.rail->attach(*link.peer, noise, kPatience, &remote).code, StatusCode::kInvalidArgument);
    EXPECT_FALSE(a.rail->connect(noise, kSecond, &peer).ok());
  }
  RailAddress parts;
  ASSERT_TRUE(libfabric::parse(address, &parts));
  const auto refused = [&](const std::string& name) {
    RailAddress hostile = parts;
    hostile.name = name;
    return a.rail->connect(libfabric::encode(hostile), kSecond, &peer).code == StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused(std::string("fi_shm://../../etc/passwd\0", 26)));
  EXPECT_TRUE(refused(std::string("fi_shm://no_end", 15)));
  EXPECT_TRUE(refused(std::string(1, '\0')));
  EXPECT_TRUE(refused(std::string(128, 'A')));
  EXPECT_TRUE(refused(std::string(16, '\x7f')));
  RailAddress foreign = parts;
  foreign.provider ^= 1;
  EXPECT_EQ(a.rail->connect(libfabric::encode(foreign), kSecond, &peer).code, StatusCode::kPeerUnreachable);
  link.post(link.signal(1, 1), {&a, &b});
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.size() == 1; }));
}

// Nobody lives at the address: the requests wait, other peers are served, and disconnect() gives the requests back.
TEST_P(LibfabricRefusal, PeerThatIsGone) {
  Side a(spec()), b(spec());
  std::string address, key;
  {
    Side gone(spec());
    address = gone.rail->address();
    key = gone.key;
  }
  std::unique_ptr<RailPeer> peer;
  const Status status = a.rail->connect(address, kSecond, &peer);
  Link alive(a, b);
  if (status.ok()) {
    std::unique_ptr<RemoteMemory> remote;
    ASSERT_TRUE(a.rail->attach(*peer, key, kPatience, &remote).ok());
    for (uint64_t i = 0; i < 10; ++i) {
      WorkRequest request = alive.signal(100 + i, 1);
      request.peer = peer.get();
      EXPECT_EQ(a.rail->post({&request, 1}).accepted, 1u);
    }
  }
  for (uint32_t i = 0; i < 50; ++i) {
    alive.post(alive.signal(i, i), {&a, &b});
    ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.size() == i + 1; }));
  }
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.size() >= 50; }));
  if (!status.ok()) {
    EXPECT_EQ(status.kind, StatusKind::kPeer);
    return;
  }
  EXPECT_TRUE(a.rail->disconnect(*peer).ok());
  ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.done.size() == 60; }));
  EXPECT_EQ(std::count_if(a.done.begin(), a.done.end(),
                          [](const auto& done) { return done.second.code == StatusCode::kPeerDead; }),
            10);
}

INSTANTIATE_TEST_SUITE_P(Providers, LibfabricRefusal, kProfiles,
                         [](const auto& info) { return name_of_profile(info.param); });

TEST(LibfabricOpen, EfaStatesWhyItCannot) {
  std::unique_ptr<Rail> rail;
  std::string detail;
  const Status status = open_libfabric_rail(spec_of("efa"), &rail, &detail);
  if (status.ok()) GTEST_SKIP() << "this machine has an EFA device";
  EXPECT_EQ(status.code, StatusCode::kNoProvider);
  EXPECT_NE(detail.find("efa"), std::string::npos) << detail;
  EXPECT_NE(detail.find("libfabric"), std::string::npos) << detail;
}

TEST(LibfabricOpen, RefusesWhatItDoesNotKnow) {
  std::unique_ptr<Rail> rail;
  std::string detail;
  EXPECT_EQ(open_libfabric_rail(spec_of("tcp colour=red"), &rail, &detail).code, StatusCode::kInvalidArgument);
  EXPECT_NE(detail.find("colour"), std::string::npos) << detail;
  EXPECT_EQ(open_libfabric_rail(spec_of("efa address=127.0.0.1"), &rail, &detail).code, StatusCode::kInvalidArgument);
  EXPECT_EQ(open_libfabric_rail(spec_of("tcp eager_posts=many"), &rail, &detail).code, StatusCode::kInvalidArgument);
  EXPECT_FALSE(open_libfabric_rail(spec_of("tcp address=not-an-address"), &rail, &detail).ok());
  EXPECT_FALSE(open_libfabric_rail(spec_of("tcp prov=no_such_provider"), &rail, &detail).ok());
  EXPECT_NE(detail.find("no_such_provider"), std::string::npos) << detail;
  EXPECT_EQ(open_libfabric_rail(spec_of("tcp library=/nowhere/libfabric.so.1"), &rail, &detail).code,
            StatusCode::kNoProvider);
  EXPECT_NE(detail.find("apt-get install libfabric1"), std::string::npos) << detail;
  EXPECT_EQ(open_libfabric_rail(spec_of("tcp library=libm.so.6"), &rail, &detail).code, StatusCode::kNoProvider);
  RailSpec device = spec_of("tcp");
  device.device = "nodevice0";
  EXPECT_FALSE(open_libfabric_rail(device, &rail, &detail).ok());
  EXPECT_NE(detail.find("nodevice0"), std::string::npos) << detail;
}

TEST(LibfabricOpen, BindsLoopbackAndOtherAddresses) {
  for (const char* spec : {"tcp", "tcp address=::1"}) {
    Side a(spec_of(spec)), b(spec_of(spec));
    EXPECT_EQ(a.rail->info().device, "lo");
    Link link(a, b);
    link.post(link.write_imm(0, 0, 10000, 1, 1), {&a, &b});
    ASSERT_TRUE(pump_until({&a, &b}, [&] { return b.imms.size() == 1 && a.done.size() == 1; })) << spec;
  }
}

// The program's handlers (KeyboardInterrupt, faulthandler) stay where they are.
TEST(LibfabricOpen, LeavesSignalHandlersAlone) {
  struct sigaction before[32], after[32];
  for (int i = 1; i < 32; ++i) sigaction(i, nullptr, &before[i]);
  Side a(spec_of("tcp")), b(spec_of("tcp prov=tcp;ofi_rxm"));
  for (int i = 1; i < 32; ++i) {
    sigaction(i, nullptr, &after[i]);
    EXPECT_EQ(before[i].sa_handler, after[i].sa_handler) << "signal " << i;
  }
}

// The pace of the efa profile, on a transport that runs everywhere: nothing is lost, stuck or reordered by it.
TEST(LibfabricPace, OneEagerThenAFewPerPass) {
  RailSpec paced = spec_of("tcp eager_posts=1");
  paced.options.emplace_back("posts_per_pass", "3");
  Side a(paced), b(paced), c(paced);
  Link ab(a, b), ac(a, c);
  for (uint32_t i = 0; i < 500; ++i) {
    ab.post(ab.write_imm(0, i, 64, 2 * i, i), {&a, &b, &c});
    ac.post(ac.write_imm(0, i, 64, 2 * i + 1, i), {&a, &b, &c});
  }
  ASSERT_TRUE(
      pump_until({&a, &b, &c}, [&] { return b.imms.size() == 500 && c.imms.size() == 500 && a.done.size() == 1000; }));
  for (uint32_t i = 0; i < 500; ++i) EXPECT_EQ(b.imms[i], i);
}

}  // namespace
}  // namespace asyncfabric::testing
