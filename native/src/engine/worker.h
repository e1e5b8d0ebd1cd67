// worker.h: the thread that runs the engine when nobody else does. Adaptive: spins for spin_ns after the last event, then sleeps on the
// rails' descriptors. Busy: never sleeps. It never takes the GIL and never waits for Python.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include "base/unique_fd.h"
#include "engine/core.h"

namespace asyncfabric {

class Worker {
 public:
  explicit Worker(Core& core) : core_(core) {}
  ~Worker() { stop(); }

  Status start();
  void stop();

 private:
  void run();
  void sleep();
  void wait(uint64_t limit_ns);

  Core& core_;
  UniqueFd epoll_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace asyncfabric
