// worker.h: the thread that runs the engine when nobody else does. Adaptive: spins for spin_ns after the last event, then sleeps on the
// rails' descriptors. Busy: never sleeps. It never takes the GIL and never waits for Python.
#pragma once

#include <atomic>
#include <string>
#include <thread>

#include "engine/core.h"

namespace asyncfabric {

class Worker {
 public:
  explicit Worker(Core& core) : core_(core), spin_ns_(core.config.spin_ns) {}
  ~Worker() { stop(); }

  // kInvalidArgument: the worker cannot be pinned where the config asks. kNoMemory: there is no thread for it.
  Status start(std::string* detail);
  void stop();

 private:
  void run();
  void nap();
  uint64_t sleep();  // returns how long it slept, ns
  void adapt_spin(uint64_t slept_ns);

  static constexpr uint64_t kShortSleepNs = 100'000;
  static constexpr uint64_t kLongSleepNs = 1'000'000;
  static constexpr uint64_t kMostSpins = 5;
  static constexpr uint64_t kPollingSpinNs =
      1'000'000;  // a rail without a descriptor is met by naps only, which cost 50 us and more

  Core& core_;
  uint64_t spin_ns_;  // worker thread
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace asyncfabric
