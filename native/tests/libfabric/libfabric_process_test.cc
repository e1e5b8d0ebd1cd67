// libfabric_process_test.cc: the provider contract between processes: kill -9, SIGSTOP, wake-ups.
#include "libfabric_child.h"

#include <netinet/in.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "base/unique_fd.h"
#include "providers/libfabric/peers/wire.h"

namespace asyncfabric::testing {
namespace {

constexpr size_t kRegion = 32 << 20;

// The other process. "target": answers each immediate with itself + 1 when the parent gave an address; sleeps when it can.
// "patient": does so again where its stream ended meanwhile. "writer": writes large pieces into the parent's region for ever.
TEST(LibfabricChildRole, Run) {
  const std::string role = child_role();
  if (role.empty()) GTEST_SKIP() << "runs only as the child of another test";
  Side side(spec_of(getenv("ASYNCFABRIC_TEST_PROVIDER")), kRegion);
  fill(side.region, 17);
  send_text(kChildFd, side.rail->address());
  send_text(kChildFd, side.key);
  const std::string address = receive_text(kChildFd);
  const std::string key = receive_text(kChildFd);
  ASSERT_FALSE(address.empty());
  Link back(side, address, key);
  const bool sleeps = role == "sleeper";
  size_t answered = 0, looked_at = 0;
  uint64_t posted = 0;
  for (;;) {
    side.pump();
    for (; answered < side.imms.size() && role != "writer"; ++answered)
      back.post(back.signal(answered, side.imms[answered] + 1), {&side});
    if (role == "writer" && posted < side.done.size() + 4) {
      WorkRequest request = back.write(0, 0, 24 << 20, posted);
      if (side.rail->post({&request, 1}).accepted == 1) ++posted;
    }
    for (; looked_at < side.done.size(); ++looked_at) {
      const auto [tag, status] = side.done[looked_at];
      if (status.ok()) continue;
      if (role != "patient" || status.code != StatusCode::kTransport) return;
      back.post(back.signal(tag, side.imms[tag] + 1), {&side});
    }
    pollfd entries[2] = {{kChildFd, POLLIN, 0}, {side.rail->wait_fd(), POLLIN, 0}};
    if (sleeps && side.rail->prepare_wait()) {
      (void)::poll(entries, 2, 10'000);  // a lost wake-up shows as a round trip of ten seconds
      side.rail->cancel_wait();
    } else {
      (void)::poll(entries, 1, 0);
    }
    if (entries[0].revents != 0) break;
  }
}

class LibfabricProcess : public ::testing::TestWithParam<const char*> {
 protected:
  RailSpec spec() const { return spec_of(GetParam()); }
  void SetUp() override {
    if (const std::string reason = missing(spec()); !reason.empty()) GTEST_SKIP() << reason;
  }
  bool verbs() const { return spec().provider == "ofi-verbs"; }
};

struct Remote {  // a child that exchanged addresses with `side`
  Remote(Side& side, const std::string& role, const std::string& provider) : child(role, provider) {
    address = receive_text(child.control);
    key = receive_text(child.control);
    EXPECT_FALSE(address.empty()) << "the child ended first, with " << child.status_of_death();
    send_text(child.control, side.rail->address());
    send_text(child.control, side.key);
  }
  Child child;
  std::string address;
  std::string key;
};

TEST_P(LibfabricProcess, WritesAndAnswers) {
  Side a(spec(), kRegion);
  Remote remote(a, "target", GetParam());
  Link link(a, remote.address, remote.key);
  for (uint32_t i = 0; i < 200; ++i) {
    link.post(link.write_imm(i, 3 * i, i % 3 == 0 ? 5 << 20 : 64 * i, i, 10 * i), {&a});
    ASSERT_TRUE(pump_until({&a}, [&] { return a.imms.size() == i + 1 && a.done.size() == i + 1; })) << i;
    EXPECT_EQ(a.imms.back(), 10 * i + 1);
  }
  fill(a.region, 5);
  const std::vector<uint8_t> sent = a.region;
  if (a.rail->capabilities().read) {
    link.post(link.write(0, 0, kRegion, 1), {&a});
    WorkRequest read = link.write(1, 0, kRegion - 1, 2);
    read.kind = WorkKind::kRead;
    link.post(read, {&a});
    ASSERT_TRUE(pump_until({&a}, [&] { return a.done.size() == 202; }));
    EXPECT_EQ(std::memcmp(a.region.data() + 1, sent.data(), kRegion - 1), 0);
  }
  EXPECT_EQ(remote.child.finish(), 0);
}

// Both sides sleep on their wait fd between messages: a wake-up that gets lost costs ten seconds and fails the deadline.
TEST_P(LibfabricProcess, SleepersWakeUp) {
  Side a(spec());
  if (a.rail->wait_fd() < 0) GTEST_SKIP() << "libfabric's " << a.rail->info().version << " has no wait object";
  Remote remote(a, "sleeper", GetParam());
  Link link(a, remote.address, remote.key);
  const uint64_t start = now_ns();
  size_t slept = 0;
  uint32_t rounds = 0;
  for (; rounds < 500 || slept < 6; ++rounds) {  // a fast peer answers before we sleep, and then nothing is tested
    const uint32_t i = rounds;
    link.post(link.signal(i, i), {&a});
    while (a.imms.size() < i + 1) {
      a.pump();
      if (a.imms.size() == i + 1 || !a.rail->prepare_wait()) continue;
      pollfd entry{a.rail->wait_fd(), POLLIN, 0};
      slept += ::poll(&entry, 1, 0) == 0;
      ASSERT_GT(::poll(&entry, 1, 10'000), 0) << "no wake-up at " << i;
      a.rail->cancel_wait();
    }
  }
  EXPECT_LT(now_ns() - start, 9 * kSecond);
  ASSERT_TRUE(pump_until({&a}, [&] { return a.done.size() == rounds; }));
  ASSERT_TRUE(pump_until({&a}, [&] { return a.rail->prepare_wait(); }));
  pollfd entry{a.rail->wait_fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&entry, 1, 50), 0) << "the fd stays readable although there is nothing to do";
}

// A connection that ended leaves nothing behind that the rail would look at before it sleeps.
TEST_P(LibfabricProcess, SleepsAfterConnectionsEnded) {
  Side a(spec());
  Remote remote(a, "target", GetParam());
  const auto try_to_sleep = [&a] {
    for (int i = 0; i < 100 && !a.rail->prepare_wait(); ++i) a.pump();
    a.rail->cancel_wait();
  };
  Link first(a, remote.address, remote.key);
  for (uint32_t i = 0; i < 8; ++i) {
    Link link(a, remote.address, remote.key);
    link.post(link.signal(i, i), {&a});
    ASSERT_TRUE(pump_until({&a}, [&] { return a.done.size() == i + 1 && a.imms.size() == i + 1; }));
    EXPECT_TRUE(a.rail->disconnect(*link.peer).ok());
    try_to_sleep();
  }
  first.post(first.signal(9, 9), {&a});
  ASSERT_TRUE(pump_until({&a}, [&] { return a.imms.size() == 9; }));
  try_to_sleep();
  EXPECT_EQ(remote.child.finish(), 0);
}

TEST_P(LibfabricProcess, KilledPeerFailsItsRequestsAndNobodyElses) {
  Side a(spec(), kRegion);
  Remote victim(a, "target", GetParam()), other(a, "target", GetParam());
  Link dead(a, victim.address, victim.key), alive(a, other.address, other.key);
  dead.post(dead.signal(1, 1), {&a});
  alive.post(alive.signal(2, 2), {&a});
  ASSERT_TRUE(pump_until({&a}, [&] { return a.done.size() == 2 && a.imms.size() == 2; }));
  a.done.clear();
  a.imms.clear();
  for (uint64_t i = 0; i < 16; ++i) dead.post(dead.write(0, 0, kRegion, 100 + i), {});
  victim.child.die();
  const uint64_t start = now_ns();
  ASSERT_TRUE(pump_until({&a}, [&] { return a.done.size() == 16; }));
  EXPECT_LT(now_ns() - start, kSecond);
  // A queue pair only reports that it was flushed or got no answer; who is dead is found out by the heartbeats of the engine.
  const StatusKind kind = verbs() ? StatusKind::kTransfer : StatusKind::kPeer;
  EXPECT_GT(std::count_if(a.done.begin(), a.done.end(), [&](const auto& done) { return done.second.kind == kind; }), 0);
  for (const auto& [tag, status] : a.done)
    EXPECT_TRUE(status.ok() || status.kind == kind) << status_text(status.code) << " " << status.raw;
  if (a.rail->capabilities().reports_peer_loss) {
    ASSERT_TRUE(pump_until({&a}, [&] { return a.lost.size() == 1; }));
    EXPECT_EQ(a.lost[0].first, dead.peer.get());
  }
  a.done.clear();
  for (uint64_t i = 0; i < 50; ++i) {
    alive.post(alive.write_imm(0, 0, 1 << 20, i, 7), {&a});
    ASSERT_TRUE(pump_until({&a}, [&] { return a.imms.size() == i + 1; }))
        << "the living peer is blocked by the dead one";
  }
  // New work for the dead one never blocks either: it waits in its backlog until somebody disconnects.
  const WorkRequest late = dead.write(0, 0, 64, 999);
  EXPECT_EQ(a.rail->post({&late, 1}).accepted, 1u);
  EXPECT_TRUE(a.rail->disconnect(*dead.peer).ok());
  ASSERT_TRUE(pump_until({&a}, [&] { return !a.done.empty() && a.done.back().first == 999; }));
  EXPECT_EQ(a.done.back().second.code, StatusCode::kPeerDead);
  EXPECT_TRUE(a.rail->release_memory(a.memory, 5 * kSecond).ok());
}

TEST_P(LibfabricProcess, StoppedPeerIsFlushed) {
  Side a(spec(), kRegion);
  Remote remote(a, "target", GetParam());
  Link link(a, remote.address, remote.key);
  link.post(link.signal(0, 0), {&a});
  ASSERT_TRUE(pump_until({&a}, [&] { return a.imms.size() == 1 && a.done.size() == 1; }));
  remote.child.send_signal(SIGSTOP);
  for (uint64_t i = 1; i <= 8; ++i) link.post(link.write(0, 0, kRegion, i), {});
  for (int i = 0; i < 1000; ++i) a.pump();
  const Status status = a.rail->disconnect(*link.peer);
  EXPECT_TRUE(status.ok());
  ASSERT_TRUE(pump_until({&a}, [&] { return a.done.size() == 9; }));
  const WorkRequest late = link.write(0, 0, 64, 99);
  EXPECT_EQ(a.rail->post({&late, 1}).accepted, 1u);
  ASSERT_TRUE(pump_until({&a}, [&] { return a.done.size() == 10; }));
  EXPECT_FALSE(a.done.back().second.ok());
}

// INV-2 at the target: memory is not given back while a peer may be half-way through a write into it.
TEST_P(LibfabricProcess, ReleaseWaitsForHalfWrittenData) {
  Side a(spec(), kRegion);
  Remote remote(a, "writer", GetParam());
  const auto arrived = [&] { return a.region[(1 << 20) + 12345] == pattern((1 << 20) + 12345, 17); };
  ASSERT_TRUE(pump_until({&a}, arrived));
  if (!verbs()) {                       // the NIC writes there, and refuses each packet once the key is dead
    remote.child.send_signal(SIGSTOP);  // with some of 24 MiB sent
    for (int i = 0; i < 1000; ++i) a.pump();
    const uint64_t start = now_ns();
    EXPECT_EQ(a.rail->release_memory(a.memory, kSecond / 5).code, StatusCode::kDrainTimeout);
    EXPECT_GE(now_ns() - start, kSecond / 5);
    ASSERT_NE(a.memory, nullptr);  // still pinned
    remote.child.send_signal(SIGCONT);
  }
  EXPECT_TRUE(a.rail->release_memory(a.memory, 10 * kSecond).ok());
  std::fill(a.region.begin(), a.region.end(), 0xee);
  for (int i = 0; i < 20000; ++i) a.pump();
  EXPECT_TRUE(std::all_of(a.region.begin(), a.region.end(), [](uint8_t x) { return x == 0xee; }))
      << "written after release";
}

// How long releasing a region takes that the peers may have a key of.
uint64_t time_to_release(Side& a) {
  std::vector<uint8_t> bytes(4096);
  std::unique_ptr<LocalMemory> memory;
  std::string key;
  EXPECT_TRUE(a.rail->register_memory({bytes.data(), bytes.size(), kHostDevice, -1, 3}, &memory, &key).ok());
  const uint64_t start = now_ns();
  const Status status = a.rail->release_memory(memory, 10 * kSecond);
  EXPECT_TRUE(status.ok()) << status_text(status.code);
  return now_ns() - start;
}

// Its stream is ended from here, so nothing of it can come any more, and nobody waits for it again.
TEST_P(LibfabricProcess, StoppedWriterHoldsReleasesUpOnceAndWritesNoMore) {
  if (verbs()) GTEST_SKIP() << "the NIC writes there, and refuses each packet once the key is dead";
  Side a(spec(), kRegion);
  Remote remote(a, "writer", GetParam());
  ASSERT_TRUE(pump_until({&a}, [&] { return a.region[12345] == pattern(12345, 17); }));
  ASSERT_LT(time_to_release(a), kSecond) << "it has answered, so it has named its stream";
  ASSERT_TRUE(pump_until({&a}, [&] { return a.region[(1 << 20) + 12345] == pattern((1 << 20) + 12345, 17); }));
  remote.child.send_signal(SIGSTOP);  // with some of 24 MiB sent
  for (int i = 0; i < 1000; ++i) a.pump();
  const uint64_t start = now_ns();
  EXPECT_TRUE(a.rail->release_memory(a.memory, 10 * kSecond).ok());
  EXPECT_GE(now_ns() - start, kSecond) << "a sender that answers late loses its stream";
  EXPECT_LT(now_ns() - start, 5 * kSecond);
  std::fill(a.region.begin(), a.region.end(), 0xee);
  for (int i = 0; i < 5; ++i) EXPECT_LT(time_to_release(a), kSecond / 2);
  remote.child.send_signal(SIGCONT);
  for (int i = 0; i < 20000; ++i) a.pump();
  EXPECT_TRUE(std::all_of(a.region.begin(), a.region.end(), [](uint8_t x) { return x == 0xee; }))
      << "written after release";
}

// It opens another stream when it goes on, and is waited for again.
TEST_P(LibfabricProcess, StoppedPeerThatGoesOnIsAPeerAgain) {
  if (verbs()) GTEST_SKIP() << "over sockets";
  Side a(spec(), kRegion);
  Remote remote(a, "patient", GetParam());
  Link link(a, remote.address, remote.key);
  uint32_t sent = 0;
  const auto answers = [&] {
    link.post(link.signal(sent, 2 * sent), {&a});
    ++sent;
    return pump_until({&a}, [&] { return a.imms.size() == sent && a.done.size() == sent; });
  };
  ASSERT_TRUE(answers());
  EXPECT_LT(time_to_release(a), kSecond);
  remote.child.send_signal(SIGSTOP);
  EXPECT_LT(time_to_release(a), 5 * kSecond);
  EXPECT_LT(time_to_release(a), kSecond / 2);
  remote.child.send_signal(SIGCONT);
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(answers()) << "answer " << i;
  EXPECT_LT(time_to_release(a), kSecond);
  remote.child.send_signal(SIGSTOP);
  EXPECT_GE(time_to_release(a), kSecond) << "nobody waited for a sender that is connected again";
  remote.child.send_signal(SIGCONT);
  ASSERT_TRUE(answers());
  EXPECT_EQ(remote.child.finish(), 0);
}

// What the kernel opened at the port of a dead sender, or a stranger, is no sign that it lives.
TEST_P(LibfabricProcess, AStrangerAtTheAddressOfADeadSenderHoldsNobodyUp) {
  if (verbs()) GTEST_SKIP() << "over sockets";
  Side a(spec(), kRegion);
  Remote remote(a, "target", GetParam());
  Link link(a, remote.address, remote.key);
  link.post(link.signal(0, 0), {&a});
  ASSERT_TRUE(pump_until({&a}, [&] { return a.imms.size() == 1 && a.done.size() == 1; }));
  EXPECT_LT(time_to_release(a), kSecond);
  libfabric::RailAddress dead;
  ASSERT_TRUE(libfabric::parse(remote.address, &dead));
  remote.child.die();
  UniqueFd stranger(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int yes = 1;
  (void)setsockopt(stranger.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  sockaddr_in at{};
  std::memcpy(&at, dead.name.data(), std::min(dead.name.size(), sizeof at));
  ASSERT_EQ(::bind(stranger.get(), reinterpret_cast<const sockaddr*>(&at), sizeof at), 0) << strerror(errno);
  ASSERT_EQ(::listen(stranger.get(), 16), 0);
  for (int i = 0; i < 5; ++i) EXPECT_LT(time_to_release(a), kSecond / 2) << i;
}

TEST_P(LibfabricProcess, KilledWriterDoesNotHoldUpRelease) {
  Side a(spec(), kRegion);
  Remote remote(a, "writer", GetParam());
  ASSERT_TRUE(pump_until({&a}, [&] { return a.region[12345] == pattern(12345, 17); }));
  remote.child.die();
  EXPECT_TRUE(a.rail->release_memory(a.memory, 5 * kSecond).ok());
  std::fill(a.region.begin(), a.region.end(), 0xee);
  for (int i = 0; i < 1000; ++i) a.pump();
  EXPECT_TRUE(std::all_of(a.region.begin(), a.region.end(), [](uint8_t x) { return x == 0xee; }));
}

INSTANTIATE_TEST_SUITE_P(Providers, LibfabricProcess, kProfiles,
                         [](const auto& info) { return name_of_profile(info.param); });

}  // namespace
}  // namespace asyncfabric::testing
