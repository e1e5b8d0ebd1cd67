// local_process_test.cc: two processes: mapped writes, kernel copies, and death by SIGKILL in the middle of things.
// Each test forks before it opens a rail, so that no thread is lost in the child.
#include <linux/capability.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "local_rig.h"
#include "providers/local/peers/identity.h"
#include "providers/local/peers/outgoing.h"
#include "providers/local/peers/process_watch.h"

namespace asyncfabric {
namespace {

using namespace local_rig;

// A child that runs `body` with one end of a socket pair. Killed with the parent; reaped by the destructor.
class Child {
 public:
  explicit Child(const std::function<int(int)>& body) {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      close(ends[0]);
      _exit(body(ends[1]));
    }
    close(ends[1]);
    fd_ = ends[0];
  }
  ~Child() {
    kill();
    close(fd_);
  }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  int wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  int fd() const { return fd_; }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = 0;
  int fd_ = -1;
};

void put(int fd, const std::string& text) {
  const auto length = static_cast<uint32_t>(text.size());
  if (write(fd, &length, sizeof length) != sizeof length || write(fd, text.data(), length) != ssize_t{length})
    _exit(90);
}

std::string get(int fd) {
  uint32_t length = 0;
  if (recv(fd, &length, sizeof length, MSG_WAITALL) != sizeof length) return {};
  std::string text(length, '\0');
  return recv(fd, text.data(), length, MSG_WAITALL) == ssize_t{length} ? text : std::string();
}

// The child owns a region, reports its address and key, and echoes each immediate back until it gets 999.
int own_region(int fd, Kind kind, const Words& options) {
  Endpoint endpoint(options);
  Block block(4 << 20, kind);
  block.randomise(5);
  put(fd, endpoint.rail->address());
  put(fd, block.enrol(endpoint));
  auto peer = endpoint.connect(get(fd));
  if (peer == nullptr) return 1;
  bool over = false;
  std::vector<uint32_t> echo;
  endpoint.on_imm = [&](uint32_t imm) {
    over = over || imm == 999;
    echo.push_back(imm);
  };
  const uint64_t deadline = now_ns() + 3 * kPatienceNs;
  while (!over) {
    if (endpoint.poll() == 0) sched_yield();
    for (const uint32_t imm : echo) endpoint.post({signal(*peer, block.data()[imm], 10'000 + endpoint.done.size())});
    echo.clear();
    if (now_ns() > deadline) return 2;
  }
  return 0;
}

struct ProcessWay {
  const char* name;
  const char* foreign;
  Kind kind;
};

class LocalProcesses : public ::testing::TestWithParam<ProcessWay> {};

TEST_P(LocalProcesses, WritesReadsAndNoticesCross) {
  const Words options{{"foreign", GetParam().foreign}};
  Child child([&](int fd) { return own_region(fd, GetParam().kind, options); });
  Endpoint endpoint(options);
  const std::string address = get(child.fd());
  const std::string key = get(child.fd());
  put(child.fd(), endpoint.rail->address());
  auto peer = endpoint.connect(address);
  ASSERT_NE(peer, nullptr);
  auto remote = attach(endpoint, *peer, key);
  ASSERT_NE(remote, nullptr);

  Block source(4 << 20);
  Block back(4 << 20);
  source.randomise(9);
  // 1,024 pages of 4 KiB in reverse order, one notice, then everything back by reads.
  constexpr uint64_t kPages = 1024;
  std::vector<WorkRequest> batch;
  for (uint64_t i = 0; i < kPages; ++i) {
    batch.push_back(
        transfer(WorkKind::kWrite, *peer, *remote, source.data() + i * 4096, (kPages - 1 - i) * 4096, 4096, i));
    batch.back().signalled = false;
  }
  batch.back().signalled = true;
  batch.back() = with_imm(batch.back(), 77);
  endpoint.post(batch);
  ASSERT_TRUE(eventually({&endpoint}, [&] { return endpoint.done.contains(kPages - 1) && endpoint.imms.size() == 1; }));
  EXPECT_TRUE(endpoint.done[kPages - 1].ok());
  EXPECT_EQ(endpoint.imms[0], source.data()[(kPages - 1) * 4096 + 77])
      << "the child looked before the bytes were there";
  batch.clear();
  for (uint64_t i = 0; i < 4; ++i)
    batch.push_back(transfer(WorkKind::kRead, *peer, *remote, back.data() + (i << 20), i << 20, 1 << 20, 2000 + i));
  endpoint.post(batch);
  ASSERT_TRUE(eventually({&endpoint}, [&] { return endpoint.done.contains(2003); }));
  for (uint64_t i = 0; i < kPages; ++i)
    ASSERT_EQ(std::memcmp(back.data() + (kPages - 1 - i) * 4096, source.data() + i * 4096, 4096), 0) << i;
  endpoint.post({signal(*peer, 999, 5000)});
  EXPECT_EQ(child.wait(), 0);
  ASSERT_TRUE(eventually({&endpoint}, [&] { return endpoint.lost.size() == 1; })) << "it exited";
}

TEST_P(LocalProcesses, OwnerKilledWhileWeWrite) {
  const Words options{{"foreign", GetParam().foreign}};
  Child child([&](int fd) { return own_region(fd, GetParam().kind, options); });
  Endpoint endpoint(options);
  const std::string address = get(child.fd());
  const std::string key = get(child.fd());
  put(child.fd(), endpoint.rail->address());
  auto peer = endpoint.connect(address);
  auto remote = attach(endpoint, *peer, key);
  Block source(1 << 20);
  uint64_t tag = 0;
  uint64_t reported = 0;
  const auto write_some = [&] {
    const auto request = transfer(WorkKind::kWrite, *peer, *remote, source.data(), 0, 1 << 20, ++tag);
    if (endpoint.rail->post({&request, 1}).accepted == 0) --tag;
    endpoint.poll();
    reported = endpoint.done.size();
  };
  while (reported < 20) write_some();
  child.kill();
  const uint64_t killed = now_ns();
  while (endpoint.lost.empty() && now_ns() - killed < kPatienceNs) write_some();
  ASSERT_EQ(endpoint.lost.size(), 1u);
  EXPECT_EQ(endpoint.lost[0], peer.get());
  EXPECT_LT(now_ns() - killed, 900'000'000u) << "a second on one host is the limit";
  write_some();
  ASSERT_TRUE(eventually({&endpoint}, [&] { return endpoint.done.size() == tag; })) << "each write is reported";
  EXPECT_EQ(endpoint.done[tag].code, StatusCode::kPeerDead);
  std::unique_ptr<RemoteMemory> none;
  EXPECT_EQ(endpoint.rail->attach(*peer, key, kPatienceNs, &none).code, StatusCode::kPeerDead);
  std::unique_ptr<RailPeer> again;
  EXPECT_EQ(endpoint.rail->connect(address, kPatienceNs, &again).code, StatusCode::kPeerUnreachable);
}

// Like a process with memory of a GPU, one with much memory is taken down for a while before its pidfd speaks.
TEST(ProcessWatch, KnowsThatAProcessIsLeavingBeforeItIsGone) {
  constexpr size_t kBytes = 1ull << 30;
  bool early = false;
  for (int round = 0; round < 10 && !early; ++round) {
    Child child([](int fd) {
      void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      madvise(memory, kBytes, MADV_NOHUGEPAGE);
      for (size_t at = 0; at < kBytes; at += 4096) static_cast<volatile char*>(memory)[at] = 1;
      put(fd, "ready");
      pause();
      return 0;
    });
    get(child.fd());
    std::shared_ptr<local::ProcessWatch> watch;
    ASSERT_TRUE(local::ProcessWatch::open(child.pid(), local::process_start(child.pid()), &watch).ok());
    EXPECT_FALSE(watch->leaving());
    ::kill(child.pid(), SIGKILL);
    const uint64_t killed = now_ns();
    while (!watch->leaving() && now_ns() - killed < kPatienceNs) {}
    early = !watch->gone();
    EXPECT_TRUE(watch->leaving());
    while (!watch->gone() && now_ns() - killed < kPatienceNs) {}
    EXPECT_TRUE(watch->gone());
    EXPECT_TRUE(watch->leaving());
  }
  EXPECT_TRUE(early) << "a process that takes long to die was never seen leaving";
}

TEST(ProcessWatch, WhoHasNoDescriptorLeftLosesNobody) {
  Child child([](int) {
    pause();
    return 0;
  });
  const uint64_t start = local::process_start(child.pid());
  std::shared_ptr<local::ProcessWatch> watch;
  ASSERT_TRUE(local::ProcessWatch::open(child.pid(), start, &watch).ok());
  {
    const NoDescriptors none;
    EXPECT_FALSE(watch->leaving());
    std::shared_ptr<local::ProcessWatch> another;
    for (const auto& [pid, its_start] : {std::pair{child.pid(), start}, std::pair{getpid(), uint64_t{1}}}) {
      const Status status = local::ProcessWatch::open(pid, its_start, &another);
      EXPECT_EQ(status.code, StatusCode::kNoMemory);
      EXPECT_EQ(status.raw, EMFILE);
    }
  }
  ::kill(child.pid(), SIGKILL);
  const uint64_t killed = now_ns();
  while (!watch->leaving() && now_ns() - killed < kPatienceNs) {}
  EXPECT_TRUE(watch->leaving());
}

TEST_P(LocalProcesses, WriterKilledInTheMiddleOfACopyBlocksNoRevoke) {
  const Words options{{"foreign", GetParam().foreign}};
  for (int round = 0; round < 5; ++round) {
    Child child([&](int fd) {
      Endpoint endpoint(options);
      auto peer = endpoint.connect(get(fd));
      auto remote = attach(endpoint, *peer, get(fd));
      Block source(1 << 20);
      for (uint64_t tag = 1;; ++tag) {
        auto request = transfer(WorkKind::kWrite, *peer, *remote, source.data(), 0, 1 << 20, tag);
        if (tag == 5) request = with_imm(request, 1);
        endpoint.post({request});
        endpoint.poll();
      }
      return 0;
    });
    Endpoint endpoint(options);
    Block target(1 << 20, GetParam().kind);
    put(child.fd(), endpoint.rail->address());
    std::string key = target.enrol(endpoint);
    put(child.fd(), key);
    ASSERT_TRUE(eventually({&endpoint}, [&] { return !endpoint.imms.empty(); }));
    child.kill();
    EXPECT_TRUE(endpoint.rail->revoke_memory(*target.handle, kPatienceNs, &key).ok()) << "waits for a dead writer";
    EXPECT_TRUE(endpoint.rail->release_memory(target.handle, kPatienceNs).ok());
    while (endpoint.poll() > 0) {}
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, LocalProcesses,
                         ::testing::Values(ProcessWay{"mapped", "auto", Kind::kMemfd},
                                           ProcessWay{"kernelCopy", "auto", Kind::kForeign},
                                           ProcessWay{"bounce", "bounce", Kind::kForeign}),
                         [](const auto& info) { return info.param.name; });

// Takes this thread's right to look into processes that forbid it, where it has it (root).
class WithoutPtrace {
 public:
  WithoutPtrace() {
    syscall(SYS_capget, &header_, before_);
    __user_cap_data_struct less[2] = {before_[0], before_[1]};
    less[0].effective &= ~(1u << CAP_SYS_PTRACE);
    EXPECT_EQ(syscall(SYS_capset, &header_, less), 0);
  }
  ~WithoutPtrace() { syscall(SYS_capset, &header_, before_); }

 private:
  __user_cap_header_struct header_{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct before_[2] = {};
};

// The kernel refuses process_vm_writev from the start, or from some moment on: bytes go through the staging area instead.
class LocalRefusal : public ::testing::TestWithParam<bool> {};

TEST_P(LocalRefusal, KernelCopyFallsBackToBouncing) {
  const bool from_the_start = GetParam();
  Child child([&](int fd) {
    if (from_the_start) prctl(PR_SET_DUMPABLE, 0);
    Endpoint endpoint;
    Block block(1 << 20);
    put(fd, endpoint.rail->address());
    put(fd, block.enrol(endpoint));
    auto peer = endpoint.connect(get(fd));
    endpoint.on_imm = [&](uint32_t imm) {
      if (imm == 1) prctl(PR_SET_DUMPABLE, 0);
      if (imm == 3) _exit(block.data()[0] == 0x61 && block.data()[(1 << 20) - 1] == 0x62 ? 0 : 3);
      endpoint.post({signal(*peer, 7, imm)});
    };
    for (;;)
      if (endpoint.poll() == 0) sched_yield();
    return 1;
  });
  const WithoutPtrace humble;
  Endpoint endpoint;
  const std::string address = get(child.fd());
  const std::string key = get(child.fd());
  put(child.fd(), endpoint.rail->address());
  auto peer = endpoint.connect(address);
  auto remote = attach(endpoint, *peer, key);
  const auto foreign = [&] { return static_cast<local::PeerHandle&>(*peer).link->foreign; };
  EXPECT_EQ(foreign(), from_the_start ? local::ForeignPath::kBounce : local::ForeignPath::kKernelCopy);
  const std::string first(4096, '\x61');
  const std::string second(4096, '\x62');
  endpoint.post({with_imm(transfer(WorkKind::kWrite, *peer, *remote, first.data(), 0, 4096, 1), 1)});
  ASSERT_TRUE(eventually({&endpoint}, [&] { return endpoint.imms.size() == 1 && endpoint.done.contains(1); }));
  endpoint.post({with_imm(transfer(WorkKind::kWrite, *peer, *remote, second.data(), (1 << 20) - 4096, 4096, 2), 2)});
  ASSERT_TRUE(eventually({&endpoint}, [&] { return endpoint.imms.size() == 2 && endpoint.done.contains(2); }));
  EXPECT_TRUE(endpoint.done[1].ok());
  EXPECT_TRUE(endpoint.done[2].ok());
  EXPECT_EQ(foreign(), local::ForeignPath::kBounce);
  endpoint.post({signal(*peer, 3, 3)});
  EXPECT_EQ(child.wait(), 0);
}

INSTANTIATE_TEST_SUITE_P(Moments, LocalRefusal, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "atConnect" : "later"; });

TEST(LocalProcess, DeathIsSeenThoughAForkHoldsTheSockets) {
  int pids[2];
  ASSERT_EQ(pipe(pids), 0);
  Child child([&](int fd) {
    Endpoint endpoint;
    put(fd, endpoint.rail->address());
    auto peer = endpoint.connect(get(fd));
    endpoint.post({signal(*peer, 1, 1)});
    const pid_t heir = fork();  // as Python's multiprocessing does: inherits each descriptor, not the threads
    if (heir == 0) {
      prctl(PR_SET_PDEATHSIG, 0);
      pause();
      _exit(0);
    }
    if (write(pids[1], &heir, sizeof heir) != sizeof heir) return 1;
    for (;;) endpoint.poll();
  });
  Endpoint endpoint;
  auto peer = endpoint.connect(get(child.fd()));
  put(child.fd(), endpoint.rail->address());
  pid_t heir = 0;
  ASSERT_EQ(read(pids[0], &heir, sizeof heir), ssize_t{sizeof heir});
  ASSERT_TRUE(eventually({&endpoint}, [&] { return endpoint.imms.size() == 1; }));
  child.kill();
  EXPECT_TRUE(eventually({&endpoint}, [&] { return endpoint.lost.size() == 1; }));
  kill(heir, SIGKILL);
  close(pids[0]);
  close(pids[1]);
}

TEST(LocalProcess, MessagesSentBeforeDeathArriveBeforeTheLoss) {
  Child child([&](int fd) {
    Endpoint endpoint;
    put(fd, endpoint.rail->address());
    auto peer = endpoint.connect(get(fd));
    std::vector<WorkRequest> batch;
    const std::string text(16'000, 'm');
    for (uint64_t i = 0; i < 100; ++i) batch.push_back(message(*peer, text, i));
    endpoint.post(batch);
    kill(getpid(), SIGKILL);
    return 0;
  });
  Endpoint endpoint;
  auto peer = endpoint.connect(get(child.fd()));
  put(child.fd(), endpoint.rail->address());
  child.wait();  // more bytes than one poll takes, and nobody polled yet
  ASSERT_TRUE(eventually({&endpoint}, [&] { return endpoint.lost.size() == 1; }));
  EXPECT_EQ(endpoint.messages.size(), 100u);
}

}  // namespace
}  // namespace asyncfabric
