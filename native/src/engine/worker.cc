// worker.cc: see worker.h.
#include "engine/worker.h"

#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace asyncfabric {

Status Worker::start() {
  epoll_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_) return {StatusCode::kInternal, errno};
  std::vector<int> fds{core_.gate.fd()};
  for (const auto& rail : core_.rails)
    if (rail->rail->wait_fd() >= 0) fds.push_back(rail->rail->wait_fd());
  for (const int fd : fds) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return {StatusCode::kInternal, errno};
  }
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "af-worker");
  return {};
}

void Worker::stop() {
  stopping_.store(true, std::memory_order_seq_cst);
  core_.gate.ring();
  if (thread_.joinable()) thread_.join();
}

void Worker::run() {
  if (core_.config.worker_cpu >= 0) {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(static_cast<size_t>(core_.config.worker_cpu), &cpus);
    sched_setaffinity(0, sizeof cpus, &cpus);  // a core that is not ours to use is no reason to fail
  }
  const bool busy = core_.config.polling == PollingMode::kBusy;
  uint64_t idle_since = 0;
  while (!stopping_.load(std::memory_order_relaxed)) {
    core_.helm.lock_as_worker();
    const size_t events = core_.step();
    core_.helm.unlock();
    if (events != 0) {
      idle_since = 0;
      continue;
    }
    cpu_pause();
    if (busy) continue;
    const uint64_t now = now_ns();
    if (idle_since == 0) idle_since = now;
    if (now - idle_since < core_.config.spin_ns) continue;
    sleep();
    idle_since = 0;
  }
}

void Worker::sleep() {
  core_.helm.lock_as_worker();
  core_.gate.prepare();
  // Looked at after prepare(): whoever rings later finds us sleeping, whoever rang before is seen here.
  const bool sleepy = core_.can_sleep() && !stopping_.load(std::memory_order_seq_cst);
  const uint64_t limit = sleepy ? core_.sleep_limit_ns() : 0;
  if (sleepy) {
    core_.tallies.sleeps.add(1);
    core_.trace.point(TracePoint::kSleep, 0, limit);
  }
  core_.helm.unlock();
  if (!sleepy) {
    core_.gate.finish();
    return;
  }
  if (limit != 0) wait(limit);
  core_.helm.lock_as_worker();
  core_.gate.finish();
  for (const auto& rail : core_.rails) rail->rail->cancel_wait();
  core_.trace.point(TracePoint::kWake, 0, 0);
  core_.helm.unlock();
}

void Worker::wait(uint64_t limit_ns) {
  std::array<epoll_event, 16> events;
  const timespec limit{static_cast<time_t>(limit_ns / 1'000'000'000), static_cast<long>(limit_ns % 1'000'000'000)};
#ifdef SYS_epoll_pwait2
  if (syscall(SYS_epoll_pwait2, epoll_.get(), events.data(), static_cast<int>(events.size()), &limit, nullptr,
              size_t{0}) >= 0 ||
      errno != ENOSYS)
    return;
#endif
  epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
             static_cast<int>(std::min<uint64_t>(limit_ns / 1'000'000 + 1, 60'000)));
}

}  // namespace asyncfabric
