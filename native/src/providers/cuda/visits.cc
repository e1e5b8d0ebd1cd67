// visits.cc: see visits.h.
#include "providers/cuda/visits.h"

#include <algorithm>
#include <iterator>

#include "providers/local/memory/segment.h"

namespace asyncfabric::cuda {

bool Visits::Kept::gone() const {
  const std::shared_ptr<local::Outgoing> there = link.lock();
  return there == nullptr || there->lost.load(std::memory_order_acquire) ||
         there->board().closed.load(std::memory_order_relaxed) != 0 ||
         there->board().slots[slot].life.load(std::memory_order_acquire) != life;
}

std::shared_ptr<Visit> Visits::find(const local::RemoteHandle& remote) {
  prune();
  const std::lock_guard lock(mutex_);
  for (const Kept& one : kept_)
    if (one.link.lock() == remote.link && one.slot == remote.slot && one.length == remote.length &&
        one.life == remote.life)
      return one.visit;
  return nullptr;
}

void Visits::keep(const local::RemoteHandle& remote, const std::shared_ptr<Visit>& visit) {
  const std::lock_guard lock(mutex_);
  kept_.push_back({remote.link, remote.slot, remote.length, remote.life, visit});
}

void Visits::prune() {
  std::vector<Kept> left;  // unmapped without the lock
  const std::lock_guard lock(mutex_);
  const auto first = std::partition(kept_.begin(), kept_.end(), [](const Kept& one) { return !one.gone(); });
  std::move(first, kept_.end(), std::back_inserter(left));
  kept_.erase(first, kept_.end());
}

}  // namespace asyncfabric::cuda
