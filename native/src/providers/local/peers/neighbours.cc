// neighbours.cc: see neighbours.h.
#include "providers/local/peers/neighbours.h"

#include <sys/prctl.h>
#include <unistd.h>
#include <csignal>

#include <atomic>

namespace asyncfabric::local {

Status Neighbours::process(pid_t pid, uint64_t start, std::shared_ptr<ProcessWatch>* out) {
  const std::lock_guard lock(mutex_);
  std::erase_if(processes_, [](const auto& entry) { return entry.second.expired(); });
  if (const auto found = processes_.find(pid); found != processes_.end()) {
    auto known = found->second.lock();
    if (known != nullptr && known->start() == start) {
      *out = std::move(known);
      return {};
    }
  }
  if (const Status status = ProcessWatch::open(pid, start, out); !status.ok()) return status;
  processes_[pid] = *out;
  if ((*out)->fd() >= 0) {
    on_new_process_(**out);
    permit_kernel_copy(pid);
  }
  return {};
}

std::shared_ptr<ProcessWatch> Neighbours::find(pid_t pid) {
  const std::lock_guard lock(mutex_);
  const auto found = processes_.find(pid);
  return found == processes_.end() ? nullptr : found->second.lock();
}

void Neighbours::permit_kernel_copy(pid_t pid) {
#if defined(PR_SET_PTRACER)
  // One word of the whole process, hence static. EINVAL without Yama, where nothing needs to be permitted. Peers beyond
  // the first find process_vm_writev refused and take the bounce path.
  static std::atomic<pid_t> permitted{
      0};  // partner: none, only an exchange among service and control threads of all rails
  if (policy_ == TracerPolicy::kOff) return;
  if (policy_ == TracerPolicy::kAny) {
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    return;
  }
  pid_t nobody = permitted.load();
  if (nobody != 0 && kill(nobody, 0) == 0) return;
  if (permitted.compare_exchange_strong(nobody, pid)) prctl(PR_SET_PTRACER, static_cast<unsigned long>(pid), 0, 0, 0);
#endif
}

}  // namespace asyncfabric::local
