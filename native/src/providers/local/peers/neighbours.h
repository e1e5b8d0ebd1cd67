// neighbours.h: the processes that a rail is connected with: all connections to one share the pidfd that shows its end. Control and
// service thread.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "providers/local/peers/process_watch.h"

namespace asyncfabric::local {

// Whom the Yama security module, where it is active, lets copy into this process. It knows one process or everybody.
enum class TracerPolicy { kFirst, kAny, kOff };

class Neighbours {
 public:
  Neighbours(TracerPolicy policy, std::function<void(const ProcessWatch&)> on_new_process)
      : policy_(policy), on_new_process_(std::move(on_new_process)) {}

  Status process(pid_t pid, uint64_t start, std::shared_ptr<ProcessWatch>* out);
  std::shared_ptr<ProcessWatch> find(pid_t pid);

 private:
  void permit_kernel_copy(pid_t pid);

  TracerPolicy policy_;
  std::function<void(const ProcessWatch&)> on_new_process_;
  std::mutex mutex_;
  std::map<pid_t, std::weak_ptr<ProcessWatch>> processes_;
};

}  // namespace asyncfabric::local
