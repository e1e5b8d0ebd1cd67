// kept.cc: see kept.h.
#include "providers/local/memory/kept.h"

#include <algorithm>
#include <iterator>

#include "providers/local/memory/segment.h"

namespace asyncfabric::local {

bool Kept::One::gone() const {
  const std::shared_ptr<Outgoing> there = link.lock();
  return there == nullptr || there->lost.load(std::memory_order_acquire) ||
         there->board().closed.load(std::memory_order_relaxed) != 0 ||
         there->board().slots[slot].life.load(std::memory_order_acquire) != life;
}

std::shared_ptr<Mapping> Kept::find(const RemoteHandle& remote) {
  const std::lock_guard lock(mutex_);
  for (const One& one : kept_)
    if (one.slot == remote.slot && one.length == remote.length && one.life == remote.life &&
        one.link.lock() == remote.link)
      return one.mapping;
  return nullptr;
}

void Kept::keep(const RemoteHandle& remote) {
  const std::lock_guard lock(mutex_);
  kept_.push_back({remote.link, remote.slot, remote.length, remote.life, remote.mapping});
}

bool Kept::prune() {
  std::vector<One> left;  // unmapped without the lock
  const std::lock_guard lock(mutex_);
  const auto first = std::partition(kept_.begin(), kept_.end(), [](const One& one) { return !one.gone(); });
  std::move(first, kept_.end(), std::back_inserter(left));
  kept_.erase(first, kept_.end());
  return !kept_.empty();
}

}  // namespace asyncfabric::local
