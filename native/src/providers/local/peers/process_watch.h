// process_watch.h: a peer's process, held by a pidfd, so that its number cannot be reused under us. Any thread.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <atomic>
#include <memory>

#include "asyncfabric/status.h"
#include "base/unique_fd.h"

namespace asyncfabric::local {

class ProcessWatch {
 public:
  // kPeerDead when the process that started at `start` is not there any more. Our own process needs no pidfd.
  static Status open(pid_t pid, uint64_t start, std::shared_ptr<ProcessWatch>* out);

  pid_t pid() const { return pid_; }
  uint64_t start() const { return start_; }
  int fd() const { return fd_.get(); }  // -1: ourselves

  // True once no thread of the process runs any more, in user code or in a system call: it can touch nothing.
  bool gone() const;
  // True as soon as the kernel takes the process down, which can take a second more where it has memory of GPUs. Until it is gone
  // its devices may still write to us: this shows only that it will never answer. A look into /proc: some microseconds.
  bool leaving() const;

 private:
  ProcessWatch(pid_t pid, uint64_t start, UniqueFd fd) : pid_(pid), start_(start), fd_(std::move(fd)) {}

  pid_t pid_;
  uint64_t start_;
  UniqueFd fd_;
  mutable std::atomic<bool> gone_{false};  // caches a readable pidfd; set by whoever looks
};

}  // namespace asyncfabric::local
