// rail_watch.h: who is woken by the rails' descriptors: the worker, or the event loop.
// A message that wakes the worker, which then wakes the loop, pays for two threads on two cores. So while both sleep the rails belong
// to the loop: the message wakes it directly, and it steps the engine as a caller thread (NativeEngine::disarm). The worker then sleeps on its
// gate alone and naps, so that the rails are served too when Python computes for long without coming back to its loop.
// Two sets for the worker, chosen each time it goes to sleep, cost no system call; moving descriptors between sets would.
// Who drains a rail's bell arms it again or stays awake: a bell that nobody drained stays readable for whoever sleeps next.
#pragma once

#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <span>

#include "asyncfabric/status.h"
#include "base/unique_fd.h"

namespace asyncfabric {

class RailWatch {
 public:
  // `loop_too`: the event loop watches the rails as well.
  Status open(int worker_gate, int loop_gate, std::span<const int> rails, bool loop_too) {
    for (UniqueFd* set : {&all_, &gate_, &loop_}) {
      *set = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
      if (!*set) return {StatusCode::kNoMemory, errno};
    }
    bool added = add(all_, worker_gate) && add(gate_, worker_gate) && add(loop_, loop_gate);
    for (const int rail : rails) added = added && add(all_, rail) && (!loop_too || add(loop_, rail));
    if (added) return {};
    // ENOSPC: fs.epoll.max_user_watches.
    return {errno == ENOSPC || errno == ENOMEM ? StatusCode::kNoMemory : StatusCode::kInternal, errno};
  }

  // Takes the rails from the loop, or lends them again. For a rail that the loop does not have, and one that it has, nothing happens.
  void lend(std::span<const int> rails, bool lent) const {
    for (const int rail : rails)
      if (lent)
        (void)add(loop_, rail);
      else
        (void)epoll_ctl(loop_.get(), EPOLL_CTL_DEL, rail, nullptr);
  }

  // What the event loop waits for.
  int loop_fd() const { return loop_.get(); }

  // Worker. Returns when something rings or the time is over.
  void sleep(bool loop_has_rails, uint64_t limit_ns) const {
    const int set = loop_has_rails ? gate_.get() : all_.get();
    std::array<epoll_event, 16> events;
    const timespec limit{static_cast<time_t>(limit_ns / 1'000'000'000), static_cast<long>(limit_ns % 1'000'000'000)};
#ifdef SYS_epoll_pwait2
    if (syscall(SYS_epoll_pwait2, set, events.data(), static_cast<int>(events.size()), &limit, nullptr, size_t{0}) >=
            0 ||
        errno != ENOSYS)
      return;
#endif
    epoll_wait(set, events.data(), static_cast<int>(events.size()),
               static_cast<int>(std::min<uint64_t>(limit_ns / 1'000'000 + 1, 60'000)));
  }

 private:
  static bool add(const UniqueFd& set, int fd) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    return epoll_ctl(set.get(), EPOLL_CTL_ADD, fd, &event) == 0;
  }

  UniqueFd all_;   // worker: its gate and the rails
  UniqueFd gate_;  // worker: its gate alone
  UniqueFd loop_;  // loop: its gate, and the rails if it may have them
};

}  // namespace asyncfabric
