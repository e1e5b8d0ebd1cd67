// regions.cc: the end of regions and keys, when the last pin on them went. Control thread for the slow part.
#include "engine/core.h"

namespace asyncfabric {

void Core::unpin_region(RegionTable::Slot* slot) {
  if (regions.unpin(slot)) control.post([this, slot] { end_region(slot); });
}

void Core::unpin_key(KeyTable::Slot* slot) {
  if (keys.unpin(slot)) control.post([this, slot] { end_key(slot); });
}

// A peer that must answer may wait for a word of another of our rails, and all others for signs of life: so no rail is asked for long, and
// the engine goes on in between.
void Core::call_rails(const std::shared_ptr<RailCalls>& calls) {
  const bool first = calls->pauses.latest_ns == 0;
  const uint64_t patience_ns = first ? kControlTurnNs : 0;
  rail_calls += first ? 1 : 0;
  std::erase_if(calls->rails, [&](uint32_t rail) {
    const uint64_t begun = now_ns();
    const Status status = at_rail(rail, [&](Rail& at) { return calls->call(rail, at, patience_ns); });
    // A rail that does not use its patience has nobody to wait for.
    if (status.code == StatusCode::kDrainTimeout && (!first || now_ns() - begun >= patience_ns)) return false;
    if (!status.ok()) calls->worst = status;
    return true;
  });
  if (!calls->rails.empty() && now_ns() < calls->until_ns)
    return control.post_later(calls->pauses.next_ns(), [this, calls] { call_rails(calls); });
  --rail_calls;
  calls->done(calls->rails.empty() ? calls->worst : StatusCode::kDrainTimeout);
}

void Core::end_region(RegionTable::Slot* slot) {
  RegionEntry& region = slot->value;
  announce_revoked(slot->handle, 0);
  bool exported = false;
  {
    const std::lock_guard lock(keys_mutex);
    exported = region.exported;
  }
  const auto calls = std::make_shared<RailCalls>();
  for (uint32_t rail = 0; rail < region.memory.size(); ++rail) {
    if (!region.memory[rail]) continue;
    region.memory[rail]->handed_out = exported;
    calls->rails.push_back(rail);
  }
  calls->until_ns = now_ns() + config.drain_deadline_ns;
  calls->call = [&region](uint32_t rail, Rail& at, uint64_t patience_ns) {
    return at.release_memory(region.memory[rail], patience_ns);
  };
  calls->done = [this, slot](Status status) { region_ended(slot, status); };
  call_rails(calls);
}

void Core::region_ended(RegionTable::Slot* slot, Status status) {
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
  if (status.ok()) forget_region(slot);
  const Moment moment(*this);
  // kDrainTimeout: a peer may still write there. The entry, its pages and the caller's buffer stay pinned.
  if (!status.ok()) {
    tallies.quarantined.add(1);
    control.post_later(kQuarantineLookNs, [this, slot] { look_at_quarantined(slot); });
  }
  if (cookie != 0) publish({.cookie = cookie, .kind = CompletionKind::kControl, .status = status, .value = handle});
}

void Core::forget_region(RegionTable::Slot* slot) {
  if (slot->value.nic_regions != nullptr) slot->value.nic_regions->fetch_sub(1, std::memory_order_acq_rel);
  regions.erase(slot);
}

// Whoever could write there may be gone meanwhile.
void Core::look_at_quarantined(RegionTable::Slot* slot) {
  bool held = false;
  for (uint32_t rail = 0; rail < slot->value.memory.size(); ++rail) {
    std::unique_ptr<LocalMemory>& memory = slot->value.memory[rail];
    if (memory) held = !at_rail(rail, [&](Rail& at) { return at.release_memory(memory, 0); }).ok() || held;
  }
  if (held) return control.post_later(kQuarantineLookNs, [this, slot] { look_at_quarantined(slot); });
  forget_region(slot);
  const Moment moment(*this);
  tallies.quarantined.take_one();
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
