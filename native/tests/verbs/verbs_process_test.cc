// verbs_process_test.cc: the provider contract between processes: wake-ups, kill -9, SIGSTOP, full queues. The other process is this test binary,
// executed again in a role, so that it is a fresh process and not a fork of one that has opened the device.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "verbs_rig.h"

namespace asyncfabric::verbs_rig {
namespace {

constexpr int kChildFd = 100;  // the child's end of the control socket
constexpr size_t kRegion = 8 << 20;
const Words kFast = {{"timeout", "12"}, {"retry", "3"}};
const Words kPatient = {{"timeout", "15"}, {"retry", "6"}};  // a busy VM answers late

void send_text(int fd, const std::string& text) {
  const auto size = static_cast<uint32_t>(text.size());
  std::string bytes(reinterpret_cast<const char*>(&size), sizeof size);
  bytes += text;
  EXPECT_EQ(write(fd, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
}

std::string receive_text(int fd) {  // "" when the other end is gone
  uint32_t size = 0;
  if (recv(fd, &size, sizeof size, MSG_WAITALL) != sizeof size || size > 100000) return "";
  std::string text(size, '\0');
  if (recv(fd, text.data(), size, MSG_WAITALL) != static_cast<ssize_t>(size)) return "";
  return text;
}

// The other process answers each immediate with itself + 1; as "sleeper" it sleeps whenever it can.
TEST(VerbsChildRole, Run) {
  const char* role = getenv("ASYNCFABRIC_TEST_ROLE");
  if (role == nullptr) GTEST_SKIP() << "runs only as the child of another test";
  const bool sleeps = std::strcmp(role, "sleeper") == 0;
  Side side(device_b(), kPatient, kRegion);
  send_text(kChildFd, side.rail->address());
  send_text(kChildFd, side.key);
  const std::string address = receive_text(kChildFd);
  const std::string key = receive_text(kChildFd);
  ASSERT_FALSE(address.empty());
  Link back(side, address, key);
  size_t answered = 0;
  for (;;) {
    side.pump();
    for (; answered < side.imms.size(); ++answered) {
      const WorkRequest answer = back.signal(answered, side.imms[answered] + 1);
      if (side.rail->post({&answer, 1}).accepted == 0) break;
    }
    pollfd entries[2] = {{kChildFd, POLLIN, 0}, {side.rail->wait_fd(), POLLIN, 0}};
    if (sleeps && answered == side.imms.size() && side.rail->prepare_wait()) {
      (void)::poll(entries, 2, 10'000);  // a lost wake-up shows as a round trip of ten seconds
      side.rail->cancel_wait();
    } else {
      (void)::poll(entries, 1, 0);
    }
    if (entries[0].revents != 0) break;
  }
}

struct Remote {  // a child that exchanged addresses with `side`
  Remote(Side& side, const char* role) {
    int fds[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    control = fds[0];
    pid = fork();
    if (pid < 0) std::abort();
    if (pid == 0) {
      dup2(fds[1], kChildFd);
      setenv("ASYNCFABRIC_TEST_ROLE", role, 1);
      unsetenv("GTEST_TOTAL_SHARDS");  // the role is one test, which another shard would have
      unsetenv("GTEST_SHARD_INDEX");
      execl("/proc/self/exe", "verbs_child", "--gtest_filter=VerbsChildRole.*", "--gtest_brief=1", nullptr);
      _exit(127);
    }
    close(fds[1]);
    address = receive_text(control);
    key = receive_text(control);
    EXPECT_FALSE(address.empty());
    send_text(control, side.rail->address());
    send_text(control, side.key);
  }
  ~Remote() {
    send(SIGCONT);
    if (pid > 0) die();
    close(control);
  }
  Remote(const Remote&) = delete;
  Remote& operator=(const Remote&) = delete;
  void send(int number) const {
    if (pid > 0) kill(pid, number);
  }
  void die() {
    send(SIGKILL);
    int status = 0;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    pid = 0;
  }
  int finish() {  // asks it to end and returns its exit code
    shutdown(control, SHUT_WR);
    int status = 0;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    pid = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

  std::string address;
  std::string key;
  int control = -1;
  pid_t pid = 0;  // 0: it was reaped
};

TEST(VerbsProcess, WritesAndAnswers) {
  NEED_VERBS();
  Side a(device_a(), kFast, kRegion);
  Remote remote(a, "target");
  Link link(a, remote.address, remote.key);
  for (uint32_t i = 0; i < 100; ++i) {
    link.post(link.write_imm(i, 3 * i, i % 10 == 0 ? 1 << 20 : 64 * i, i, 10 * i), {&a});
    ASSERT_TRUE(pump_until({&a}, [&] { return a.imms.size() == i + 1 && a.done.size() == i + 1; })) << i;
    EXPECT_EQ(a.imms.back(), 10 * i + 1);
  }
  fill(a.region, 5);
  const std::vector<uint8_t> sent = a.region;
  link.post(link.write(0, 0, 1 << 20, 1), {&a});
  WorkRequest read = link.write(1, 0, (1 << 20) - 1, 2);
  read.kind = WorkKind::kRead;
  link.post(read, {&a});
  ASSERT_TRUE(pump_until({&a}, [&] { return a.done.size() == 102; }));
  EXPECT_EQ(std::memcmp(a.region.data() + 1, sent.data(), (1 << 20) - 1), 0);
  EXPECT_EQ(remote.finish(), 0);
}

// Both sides sleep on their wait fd between signals: a wake-up that gets lost costs ten seconds and fails the deadline.
TEST(VerbsProcess, SleepersWakeUp) {
  NEED_VERBS();
  Side a(device_a());
  Remote remote(a, "sleeper");
  Link link(a, remote.address, remote.key);
  const uint64_t start = now_ns();
  size_t slept = 0;
  const auto sleep_until = [&](const std::function<bool()>& condition) {
    for (;;) {
      a.pump();
      if (condition()) return true;
      if (!a.rail->prepare_wait()) continue;
      pollfd entry{a.rail->wait_fd(), POLLIN, 0};
      slept += ::poll(&entry, 1, 0) == 0;
      if (::poll(&entry, 1, 10'000) <= 0) return false;
      a.rail->cancel_wait();
    }
  };
  // The first one while nobody is connected yet: the news that it is must wake us too.
  uint32_t rounds = 0;
  for (; rounds < 300 || slept < 51; ++rounds) {  // a fast peer answers before we sleep, and then nothing is tested
    const uint32_t i = rounds;
    const WorkRequest signal = link.signal(i, i);
    ASSERT_TRUE(sleep_until([&] { return a.rail->post({&signal, 1}).accepted == 1; })) << "no wake-up at " << i;
    ASSERT_TRUE(sleep_until([&] { return a.imms.size() == i + 1; })) << "no wake-up at " << i;
  }
  EXPECT_LT(now_ns() - start, 9 * kSecond);
  ASSERT_TRUE(pump_until({&a}, [&] { return a.done.size() == rounds; }));
  ASSERT_TRUE(pump_until({&a}, [&] { return a.rail->prepare_wait(); }));
  pollfd entry{a.rail->wait_fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&entry, 1, 50), 0) << "the fd stays readable although there is nothing to do";
}

// kill -9: the device falls silent, its requests wait for a verdict, the engine's (disconnect) comes first. Others notice nothing.
TEST(VerbsProcess, KilledPeerHarmsNobodyElse) {
  NEED_VERBS();
  Side a(device_a(), kFast, kRegion);
  Remote victim(a, "target"), other(a, "target");
  Link dead(a, victim.address, victim.key), alive(a, other.address, other.key);
  dead.post(dead.signal(1, 1), {&a});
  alive.post(alive.signal(2, 2), {&a});
  ASSERT_TRUE(pump_until({&a}, [&] { return a.done.size() == 2 && a.imms.size() == 2; }));
  a.done.clear();
  a.imms.clear();
  victim.die();
  for (uint64_t i = 0; i < 16; ++i) dead.post(dead.write(0, 0, 1 << 18, 100 + i), {});
  ASSERT_TRUE(pump_until({&a}, [&] { return a.path_down; })) << "nobody reported that the peer is silent";
  EXPECT_TRUE(a.done.empty());
  for (uint64_t i = 0; i < 30; ++i) {
    alive.post(alive.write_imm(0, 0, 1 << 16, i, 7), {&a});
    ASSERT_TRUE(pump_until({&a}, [&] { return a.imms.size() == i + 1; }))
        << "the living peer is blocked by the dead one";
  }
  a.done.clear();
  EXPECT_TRUE(a.rail->disconnect(*dead.peer).ok());
  ASSERT_TRUE(pump_until({&a}, [&] { return a.done.size() == 16; }));
  for (const auto& [tag, status] : a.done) EXPECT_EQ(status.code, StatusCode::kPeerDead);
  EXPECT_TRUE(a.rail->release_memory(a.memory, 5 * kSecond).ok());
}

// Without an engine that decides, a silent peer's requests still come back, by name.
TEST(VerbsProcess, NobodyWaitsForEver) {
  NEED_VERBS();
  Side a(device_a(), kFast);
  Remote victim(a, "target");
  Link dead(a, victim.address, victim.key);
  dead.post(dead.signal(1, 1), {&a});
  ASSERT_TRUE(pump_until({&a}, [&] { return a.imms.size() == 1 && a.done.size() == 1; }));
  victim.die();
  dead.post(dead.write_imm(0, 0, 4096, 2, 2), {});
  ASSERT_TRUE(pump_until({&a}, [&] { return a.done.size() == 2; }));
  EXPECT_EQ(a.done.back().second.code, StatusCode::kAmbiguous);
}

// A stopped process: its device answers until its receives are used up, then ours waits for them. Nothing is lost when it goes on.
TEST(VerbsProcess, StoppedPeerGoesOn) {
  NEED_VERBS();
  Side a(device_a(), kPatient);
  Remote remote(a, "target");
  Link link(a, remote.address, remote.key);
  link.post(link.signal(0, 0), {&a});
  ASSERT_TRUE(pump_until({&a}, [&] { return a.imms.size() == 1 && a.done.size() == 1; }));
  remote.send(SIGSTOP);
  uint32_t posted = 0;
  for (; posted < 5000; ++posted) {
    const WorkRequest request = link.write_imm(0, 0, 64, posted, posted);
    if (a.rail->post({&request, 1}).accepted == 0) {
      const size_t done = a.done.size();
      if (!pump_until({&a}, [&] { return a.done.size() > done; }, kSecond / 5)) break;
      --posted;
    }
  }
  EXPECT_LT(posted, 5000u) << "the peer took more than it has receives for";
  remote.send(SIGCONT);
  ASSERT_TRUE(pump_until({&a}, [&] { return a.done.size() == 1u + posted && a.imms.size() == 1u + posted; }))
      << posted << " posted, " << a.done.size() << " ended, " << a.failed() << " failed, " << a.imms.size()
      << " answered, silent lanes: " << a.figures().silent_lanes << ", rebuilt: " << a.figures().rebuilt_lanes;
  EXPECT_EQ(a.failed(), 0u);
}

}  // namespace
}  // namespace asyncfabric::verbs_rig
