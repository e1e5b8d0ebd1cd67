// wake_gate.h: lets one sleeper sleep on a file descriptor without losing a wake-up, and costs a waker no system call
// while the sleeper is awake.
//   sleeper: prepare(); look for work once more; none -> block on fd(); finish()
//   waker:   make work visible with a seq_cst write; notify()
// Proof: sleeping_ and the work's own flag are both seq_cst. Either the waker sees sleeping_ == 1 and rings, or the
// sleeper's last look comes after the waker's write in the one total order and sees the work.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "base/unique_fd.h"

namespace asyncfabric {

class WakeGate {
 public:
  WakeGate() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

  int fd() const { return fd_.get(); }

  void prepare() { sleeping_.store(1, std::memory_order_seq_cst); }

  // Reads the descriptor only if somebody rang. A ring that comes just now is met by the next finish().
  void finish() {
    sleeping_.store(0, std::memory_order_seq_cst);
    if (rings_.load(std::memory_order_acquire) == rings_read_) return;
    uint64_t rings = 0;
    if (read(fd_.get(), &rings, sizeof rings) == sizeof rings) rings_read_ += rings;
  }

  bool sleeping() const { return sleeping_.load(std::memory_order_seq_cst) != 0; }

  // True when the sleeper had to be rung.
  bool notify() {
    if (sleeping_.load(std::memory_order_seq_cst) == 0) return false;
    if (sleeping_.exchange(0, std::memory_order_seq_cst) == 0) return false;  // another waker rings
    rings_.fetch_add(1, std::memory_order_release);
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(fd_.get(), &one, sizeof one);
    return true;
  }

 private:
  UniqueFd fd_;
  uint64_t rings_read_ = 0;                        // sleeper
  std::atomic<uint64_t> rings_{0};                 // partner: wakers count before they write, the sleeper compares
  alignas(64) std::atomic<uint32_t> sleeping_{0};  // partner: sleeper stores 1, wakers exchange 0
};

}  // namespace asyncfabric
