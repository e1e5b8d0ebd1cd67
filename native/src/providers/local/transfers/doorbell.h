// doorbell.h: waking a rail of this host. Ringing costs a system call only when the rail sleeps.
//   sleeper: asleep = 1; look for work once more; none -> sleep on the eventfd
//   others:  make news visible; barrier; asleep.exchange(0) was 1 -> write the eventfd
// Either the sleeper's last look sees the news, or the other side sees asleep == 1: both are separated by a full
// barrier.
#pragma once

#include <unistd.h>

#include <memory>
#include <utility>

#include "base/unique_fd.h"
#include "providers/local/memory/mapping.h"
#include "providers/local/memory/segment.h"

namespace asyncfabric::local {

class Doorbell {
 public:
  Doorbell(std::shared_ptr<Mapping> bell, UniqueFd fd) : bell_(std::move(bell)), fd_(std::move(fd)) {}

  Bell& bell() const { return *bell_->as<Bell>(); }
  int fd() const { return fd_.get(); }

  // Call after a full barrier that follows the news.
  void wake() const {
    std::atomic<uint32_t>& asleep = bell().asleep;
    if (asleep.load(std::memory_order_relaxed) == 0) return;
    if (asleep.exchange(0, std::memory_order_seq_cst) != 0) ring();
  }

  void ring() const {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t done = write(fd_.get(), &one, sizeof one);  // EAGAIN: readable already
  }

  void drain() const {
    uint64_t count;
    [[maybe_unused]] const ssize_t done = read(fd_.get(), &count, sizeof count);
  }

 private:
  std::shared_ptr<Mapping> bell_;
  UniqueFd fd_;
};

}  // namespace asyncfabric::local
