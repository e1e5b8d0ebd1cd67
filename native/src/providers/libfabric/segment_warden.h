// segment_warden.h: frees the locks that processes of this host held in shared-memory segments when they were killed; nothing else
// ends the spinning of those who wait for them, which are the worker threads of whoever they wrote to. One thread per process,
// alive while a shm rail is open; asleep until a watched process ends.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "asyncfabric/status.h"
#include "base/unique_fd.h"

namespace asyncfabric::libfabric {

class SegmentWarden {
 public:
  static Status shared(std::shared_ptr<SegmentWarden>* out, std::string* detail);  // kNoMemory: no thread or descriptor
  ~SegmentWarden();
  SegmentWarden(const SegmentWarden&) = delete;
  SegmentWarden& operator=(const SegmentWarden&) = delete;

  void watch(pid_t pid);  // any thread; our own process and those watched already pass

 private:
  explicit SegmentWarden(int wake) : wake_(wake) {}
  void run();
  std::vector<pid_t> wait_for_ends();
  void free_locks_of(pid_t pid);

  std::mutex mutex_;
  std::map<pid_t, UniqueFd> watched_;  // pidfds; under mutex_, taken out by the thread only
  UniqueFd wake_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace asyncfabric::libfabric
