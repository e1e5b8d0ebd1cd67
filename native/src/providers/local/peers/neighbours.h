// neighbours.h: what connections to one peer share, so that a bidirectional peer costs four descriptors: the pidfd of
// its process and the doorbell of its rail. Control and service thread.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "providers/local/peers/process_watch.h"
#include "providers/local/transfers/doorbell.h"

namespace asyncfabric::local {

// Whom the Yama security module, where it is active, lets copy into this process. It knows one process or everybody.
enum class TracerPolicy { kFirst, kAny, kOff };

class Neighbours {
 public:
  Neighbours(TracerPolicy policy, std::function<void(const ProcessWatch&)> on_new_process)
      : policy_(policy), on_new_process_(std::move(on_new_process)) {}

  Status process(pid_t pid, uint64_t start, std::shared_ptr<ProcessWatch>* out);
  std::shared_ptr<ProcessWatch> find(pid_t pid);

  // The doorbell of rail `rail_id` in `process`: a known one, or made of the two files just received. The process is
  // part of the name: a peer that claims another's rail id poisons nobody but itself.
  Status doorbell(const ProcessWatch& process, uint64_t rail_id, UniqueFd bell, UniqueFd eventfd,
                  std::shared_ptr<Doorbell>* out);

 private:
  void permit_kernel_copy(pid_t pid);

  TracerPolicy policy_;
  std::function<void(const ProcessWatch&)> on_new_process_;
  std::mutex mutex_;
  std::map<pid_t, std::weak_ptr<ProcessWatch>> processes_;
  std::map<std::tuple<pid_t, uint64_t, uint64_t>, std::weak_ptr<Doorbell>> doorbells_;
};

}  // namespace asyncfabric::local
