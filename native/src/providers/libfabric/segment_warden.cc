// segment_warden.cc: see segment_warden.h.
#include "providers/libfabric/segment_warden.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <utility>

#include "base/start_thread.h"
#include "providers/libfabric/process.h"
#include "providers/libfabric/segment_lock.h"

namespace asyncfabric::libfabric {
namespace {

// A lock seen held so many times in a row, a millisecond apart, is of the dead: the living hold it for the length of a copy.
constexpr int kLooks = 250;
constexpr auto kBetweenLooks = std::chrono::milliseconds(1);

void ring(const UniqueFd& wake) {
  const uint64_t one = 1;
  (void)!write(wake.get(), &one, sizeof one);
}

}  // namespace

Status SegmentWarden::shared(std::shared_ptr<SegmentWarden>* out, std::string* detail) {
  static std::mutex mutex;
  static std::weak_ptr<SegmentWarden> only;
  const std::lock_guard lock(mutex);
  *out = only.lock();
  if (*out != nullptr) return {};
  const int wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake < 0) return {StatusCode::kNoMemory, errno};
  std::shared_ptr<SegmentWarden> warden(new SegmentWarden(wake));
  const Status status = start_thread([raw = warden.get()] { raw->run(); }, &warden->thread_, detail);
  if (!status.ok()) return status;
  only = warden;
  *out = std::move(warden);
  return {};
}

SegmentWarden::~SegmentWarden() {
  stopping_.store(true);
  ring(wake_);
  if (thread_.joinable()) thread_.join();
}

void SegmentWarden::watch(pid_t pid) {
  if (pid == 0 || pid == getpid()) return;
  const std::lock_guard lock(mutex_);
  if (watched_.contains(pid)) return;
  UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (!pidfd) return;
  watched_.emplace(pid, std::move(pidfd));
  ring(wake_);
}

void SegmentWarden::run() {
  pthread_setname_np(pthread_self(), "af-warden");
  while (!stopping_.load())
    for (const pid_t pid : wait_for_ends()) free_locks_of(pid);
}

std::vector<pid_t> SegmentWarden::wait_for_ends() {
  std::vector<pollfd> entries{{wake_.get(), POLLIN, 0}};
  std::vector<pid_t> pids{0};
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [pid, pidfd] : watched_) {
      entries.push_back({pidfd.get(), POLLIN, 0});
      pids.push_back(pid);
    }
  }
  std::vector<pid_t> ended;
  if (::poll(entries.data(), entries.size(), -1) <= 0) return ended;
  uint64_t rings = 0;
  (void)!read(wake_.get(), &rings, sizeof rings);
  const std::lock_guard lock(mutex_);
  for (size_t i = 1; i < entries.size(); ++i) {
    if (entries[i].revents == 0) continue;
    watched_.erase(pids[i]);
    ended.push_back(pids[i]);
  }
  return ended;
}

// Those it may have held: of its own segments while it made progress, of ours while it posted to us.
void SegmentWarden::free_locks_of(pid_t pid) {
  std::vector<std::unique_ptr<SegmentLock>> held;
  for (const pid_t owner : {pid, getpid()})
    for (const std::string& segment : shm_segments_of(owner))
      if (auto lock = SegmentLock::open(segment); lock != nullptr) held.push_back(std::move(lock));
  for (int look = 0; look < kLooks && !held.empty(); ++look) {
    if (stopping_.load()) return;
    std::erase_if(held, [](const auto& lock) { return !lock->held(); });
    std::this_thread::sleep_for(kBetweenLooks);
  }
  for (const auto& lock : held)
    if (lock->held()) lock->free();
}

}  // namespace asyncfabric::libfabric
