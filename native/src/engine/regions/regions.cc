// regions.cc: the end of regions and keys, when the last pin on them went. Control thread for the slow part.
#include "engine/core.h"

namespace asyncfabric {

void Core::unpin_region(RegionTable::Slot* slot) {
  if (regions.unpin(slot)) control.post([this, slot] { end_region(slot); });
}

void Core::unpin_key(KeyTable::Slot* slot) {
  if (keys.unpin(slot)) control.post([this, slot] { end_key(slot); });
}

void Core::end_region(RegionTable::Slot* slot) {
  RegionEntry& region = slot->value;
  Status status;
  announce_revoked(slot->handle, 0);
  for (uint32_t rail = 0; rail < region.memory.size(); ++rail) {
    if (!region.memory[rail]) continue;
    const Status released = at_rail_in_turns(
        rail, [&](Rail& at, uint64_t patience_ns) { return at.release_memory(region.memory[rail], patience_ns); });
    if (!released.ok()) status = released;
  }
  if (status.ok() && region.nic_regions != nullptr) region.nic_regions->fetch_sub(1, std::memory_order_acq_rel);
  uint64_t cookie = 0;
  const uint64_t handle = slot->handle;
  {
    const std::lock_guard lock(keys_mutex);
    if (const auto waiting = releases.find(handle); waiting != releases.end()) {
      cookie = waiting->second;
      releases.erase(waiting);
    }
    release_until.erase(handle);
  }
  // kDrainTimeout: a peer may still write there. The entry, its pages and the caller's buffer stay pinned for good.
  if (status.ok())
    regions.erase(slot);
  else
    tallies.quarantined.value.fetch_add(1, std::memory_order_relaxed);
  if (cookie == 0) return;
  const Moment moment(*this);
  publish({.cookie = cookie, .kind = CompletionKind::kControl, .status = status, .value = handle});
}

// The region takes no new ops. Those in flight may drain until the deadline, then they are cancelled.
void Core::release_started(RegionTable::Slot* slot) {
  const std::lock_guard lock(keys_mutex);
  const auto waiting = releases.find(slot->handle);
  if (waiting == releases.end()) return;
  if (slot->value.zombies != 0) {
    publish({.cookie = waiting->second,
             .kind = CompletionKind::kControl,
             .status = StatusCode::kDrainTimeout,
             .value = slot->handle});
    releases.erase(waiting);
    return;
  }
  release_until[slot->handle] = now_ns() + config.drain_deadline_ns;
  next_tick_ns = 0;
}

void Core::expire_releases(uint64_t now) {
  std::vector<uint64_t> expired;
  {
    const std::lock_guard lock(keys_mutex);
    for (const auto& [handle, until] : release_until)
      if (now >= until) expired.push_back(handle);
    for (const uint64_t handle : expired) release_until.erase(handle);
  }
  for (const uint64_t handle : expired)
    cancel_where([handle](const Op& op) { return op.region != nullptr && op.region->handle == handle; });
}

void Core::end_key(KeyTable::Slot* slot) {
  const Moment moment(*this);
  slot->value.lanes.clear();  // nothing is in flight: each op held a pin
  keys.erase(slot);
}

}  // namespace asyncfabric
