// process_watch.cc: see process_watch.h.
#include "providers/local/peers/process_watch.h"

#include <sys/syscall.h>
#include <unistd.h>
#include <cerrno>

#include "base/descriptor_room.h"
#include "providers/local/peers/identity.h"

namespace asyncfabric::local {

Status ProcessWatch::open(pid_t pid, uint64_t start, std::shared_ptr<ProcessWatch>* out) {
  UniqueFd fd;
  if (pid != getpid()) {
    fd = UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
    if (!fd && (errno == EMFILE || errno == ENFILE)) return {StatusCode::kNoMemory, errno};
    if (!fd) return {errno == ESRCH ? StatusCode::kPeerDead : StatusCode::kUnsupported, errno};
  }
  // Looked up after the pidfd exists: if it agrees now, the pidfd is of the right process for ever.
  const uint64_t now = process_start(pid);
  if (now == 0 && descriptors_ran_out()) return {StatusCode::kNoMemory, EMFILE};
  if (now != start) return {StatusCode::kPeerDead, ESRCH};
  out->reset(new ProcessWatch(pid, start, std::move(fd)));
  return {};
}

bool ProcessWatch::gone() const {
  if (gone_.load(std::memory_order_acquire)) return true;
  if (!fd_) return false;
  pollfd look{fd_.get(), POLLIN, 0};
  if (::poll(&look, 1, 0) != 1 || (look.revents & POLLIN) == 0) return false;
  gone_.store(true, std::memory_order_release);
  return true;
}

bool ProcessWatch::leaving() const {
  if (gone()) return true;
  if (!fd_) return false;
  const ProcessState now = process_state(pid_);
  if (now.start == 0) return gone();  // or it cannot be read, as this process has no descriptor left
  return now.start != start_ || now.leaving;
}

}  // namespace asyncfabric::local
