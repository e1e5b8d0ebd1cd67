// control_calls.cc: registration, keys, connections and closing: the calls that end as kControl completions. Their slow parts run on
// the control thread.
#include <sys/mman.h>

#include <algorithm>

#include "engine/native_engine.h"

namespace asyncfabric {

void* alias_pages(void* base, uint64_t length) {
  void* again = map_shared_again(base, length);
  return again == MAP_FAILED ? nullptr : again;
}

void NativeEngine::answer(uint64_t cookie, Status status, uint64_t value) {
  const Moment moment(core_);
  core_.publish({.cookie = cookie, .kind = CompletionKind::kControl, .status = status, .value = value});
}

std::string NativeEngine::last_error() const {
  const std::lock_guard lock(core_.error_mutex);
  return core_.last_error;
}

std::string NativeEngine::reason(uint64_t cookie) const {
  const std::lock_guard lock(core_.error_mutex);
  const auto found = core_.reasons.find(cookie);
  return found != core_.reasons.end() ? found->second : std::string();
}

void NativeEngine::add_region(uint64_t cookie, Pages pages, std::unique_ptr<DeviceMemory> device_pages, void* base,
                              uint64_t length, int32_t device, uint32_t access) {
  Memory memory{base, length, device, device_pages ? device_pages->handle_fd() : pages.memfd(), access};
  UniqueFd dmabuf;
  // Not an error when there is none: a NIC's driver may know the address by itself (nvidia-peermem).
  if (const uint32_t rail = rail_of_device(device); rail < core_.rails.size() && core_.rails.size() > 1)
    core_.at_rail(rail,
                  [&](Rail& at) { return at.gpu()->export_dmabuf(base, length, &dmabuf, &memory.dmabuf_offset); });
  memory.dmabuf = dmabuf.get();
  std::vector<std::unique_ptr<LocalMemory>> handles(core_.rails.size());
  std::vector<std::string> rail_keys(core_.rails.size());
  Status status;
  std::string refused;
  bool taken = false;
  for (uint32_t rail = 0; rail < core_.rails.size() && (status.ok() || core_.config.automatic); ++rail) {
    const Status registered =
        core_.at_rail(rail, [&](Rail& at) { return at.register_memory(memory, &handles[rail], &rail_keys[rail]); });
    taken = taken || registered.ok();
    if (registered.ok()) continue;
    handles[rail].reset();
    rail_keys[rail].clear();  // in a key: this rail does not know the memory
    const std::string why = "rail " + std::to_string(rail) + " (" + core_.rails[rail]->protocol + ") failed";
    // The first that reports more than that it takes no such memory.
    if (status.ok() || (status.code == StatusCode::kUnsupported && registered.code != StatusCode::kUnsupported)) {
      status = registered;
      core_.note_error("registering " + std::to_string(length) + " bytes on " + why + reason(rail, device));
    }
    refused += (refused.empty() ? "" : "; ") + why + ": " + status_text(registered.code);
    if (registered.raw != 0) refused += " (" + std::to_string(registered.raw) + ")";
  }
  if (taken && core_.config.automatic) status = {};
  if (device != kHostDevice && status.code == StatusCode::kUnsupported) status = {StatusCode::kNoProvider, status.raw};
  uint64_t handle = 0;
  std::atomic<uint32_t>* const nic_regions = status.ok() ? nic_regions_of(device, access) : nullptr;
  if (nic_regions != nullptr) nic_regions->fetch_add(1, std::memory_order_acq_rel);  // before anybody gets a key
  if (status.ok()) {
    handle = core_.regions.insert([&](RegionEntry& region) {
      region.pages = std::move(pages);
      region.device_pages = std::move(device_pages);
      region.dmabuf = std::move(dmabuf);
      region.base = static_cast<char*>(base);
      region.length = length;
      region.device = device;
      region.access = access;
      region.refused = std::move(refused);
      region.generation = 1;
      region.revoking = 0;
      region.rail_keys = {};
      region.rail_keys[access] = std::move(rail_keys);
      region.memory = std::move(handles);
      region.nic_regions = nic_regions;
      region.zombies = 0;
    });
    if (handle == 0) status = StatusCode::kBusy;
    if (handle == 0 && nic_regions != nullptr) nic_regions->fetch_sub(1, std::memory_order_acq_rel);
  }
  if (status.ok()) {
    regions_.fetch_add(1, std::memory_order_relaxed);
    registered_bytes_.fetch_add(length, std::memory_order_relaxed);
  } else {
    // All or nothing: a region that only some rails know would hand out keys that do not work.
    auto calls = std::make_shared<RailCalls>();
    for (uint32_t rail = 0; rail < handles.size(); ++rail) {
      if (!handles[rail]) continue;
      handles[rail]->handed_out = false;
      calls->rails.push_back(rail);
    }
    calls->until_ns = now_ns() + core_.config.drain_deadline_ns;
    const auto taken_back = std::make_shared<std::vector<std::unique_ptr<LocalMemory>>>(std::move(handles));
    calls->call = [taken_back](uint32_t rail, Rail& at, uint64_t patience_ns) {
      return at.release_memory((*taken_back)[rail], patience_ns);
    };
    calls->done = [this, cookie, status](Status) { answer(cookie, status, 0); };
    return core_.call_rails(calls);
  }
  answer(cookie, status, handle);
}

// Where memory of a GPU is counted that NICs may write to; null: no such memory.
std::atomic<uint32_t>* NativeEngine::nic_regions_of(int32_t device, uint32_t access) const {
  const uint32_t gpu = rail_of_device(device);
  const auto reaches_far = [](const auto& rail) { return !rail->capabilities.same_host_only; };
  const bool written =
      (access & kAccessRemoteWrite) != 0 && std::any_of(core_.rails.begin(), core_.rails.end(), reaches_far);
  return gpu < core_.rails.size() && written ? &core_.rails[gpu]->nic_regions : nullptr;
}

Status NativeEngine::submit_register(uint64_t cookie, void* base, uint64_t length, int32_t device, uint32_t access) {
  if (core_.closing.load(std::memory_order_acquire)) return StatusCode::kClosed;
  if (base == nullptr || length == 0 || access > 3) return StatusCode::kInvalidArgument;
  core_.control.post([=, this] { add_region(cookie, Pages(), nullptr, base, length, device, access); });
  return {};
}

Status NativeEngine::submit_allocate(uint64_t cookie, uint64_t length, int32_t device, uint32_t access) {
  if (core_.closing.load(std::memory_order_acquire)) return StatusCode::kClosed;
  if (length == 0 || length > 1ull << 46 || access > 3) return StatusCode::kInvalidArgument;
  core_.control.post([=, this] {
    if (device != kHostDevice) return allocate_device(cookie, length, device, access);
    Pages pages;
    const Status status = Pages::allocate(length, &pages);
    if (!status.ok()) {
      core_.note_error("allocating " + std::to_string(length) + " bytes of shared memory failed");
      answer(cookie, status, 0);
      return;
    }
    void* base = pages.base();
    add_region(cookie, std::move(pages), nullptr, base, length, device, access);
  });
  return {};
}

// Control thread.
void NativeEngine::allocate_device(uint64_t cookie, uint64_t length, int32_t device, uint32_t access) {
  std::unique_ptr<DeviceMemory> pages;
  const uint32_t rail = rail_of_device(device);
  Status status = StatusCode::kNoProvider;
  if (rail < core_.rails.size())
    status = core_.at_rail(rail, [&](Rail& at) { return at.gpu()->allocate_memory(length, device, &pages); });
  if (!status.ok()) {
    core_.note_error("allocating " + std::to_string(length) + " bytes on cuda:" + std::to_string(device) + " failed" +
                     reason(rail, device));
    answer(cookie, status, 0);
    return;
  }
  void* base = pages->base();
  add_region(cookie, Pages(), std::move(pages), base, length, device, access);
}

// What the rail reported, as the end of a sentence.
std::string NativeEngine::reason(uint32_t rail, int32_t device) const {
  std::string why = rail < core_.rails.size() ? core_.rails[rail]->rail->why() : std::string();
  if (why.empty() && device != kHostDevice && rail_of_device(device) == core_.rails.size())
    why = "no rail of this fabric drives that GPU; FabricConfig(rails=('cuda:" + std::to_string(device) +
          "',)) opens one";
  return why.empty() ? why : ": " + why;
}

Status NativeEngine::submit_revoke(uint64_t cookie, RegionId region) {
  if (core_.closing.load(std::memory_order_acquire)) return StatusCode::kClosed;
  RegionTable::Slot* slot = core_.regions.pin(region);
  if (slot == nullptr) return StatusCode::kClosed;
  core_.control.post([this, cookie, slot, region] {
    RegionEntry& entry = slot->value;
    bool exported = false;
    {
      // First: a key that is made or shown from here on belongs to the new generation.
      const std::lock_guard lock(core_.keys_mutex);
      ++entry.generation;
      ++entry.revoking;
      exported = entry.exported;
      for (uint32_t access = 0; access < entry.rail_keys.size(); ++access)
        if (access != entry.access) entry.rail_keys[access].clear();
    }
    core_.announce_revoked(region, entry.generation);
    const auto calls = std::make_shared<RailCalls>();
    for (uint32_t rail = 0; rail < entry.memory.size(); ++rail) {
      if (!entry.memory[rail]) continue;
      entry.memory[rail]->handed_out = exported;
      calls->rails.push_back(rail);
    }
    calls->until_ns = now_ns() + core_.config.drain_deadline_ns;
    calls->call = [this, &entry](uint32_t rail, Rail& at, uint64_t patience_ns) {
      std::string key;
      const Status revoked = at.revoke_memory(*entry.memory[rail], patience_ns, &key);
      if (!revoked.ok()) return revoked;
      const std::lock_guard lock(core_.keys_mutex);
      entry.rail_keys[entry.access][rail] = std::move(key);
      return revoked;
    };
    calls->done = [this, cookie, slot, region](Status status) {
      {
        const std::lock_guard lock(core_.keys_mutex);
        --slot->value.revoking;
      }
      core_.unpin_region(slot);
      answer(cookie, status, region);
    };
    core_.call_rails(calls);
  });
  return {};
}

Status NativeEngine::submit_release(uint64_t cookie, RegionId region) {
  RegionTable::Slot* slot = core_.regions.pin(region);
  if (slot == nullptr) return StatusCode::kClosed;
  const uint64_t length = slot->value.length;
  bool closed = false;
  core_.regions.close(region, &closed);  // our pin is held: the end cannot come yet
  if (!closed) {
    core_.unpin_region(slot);
    return StatusCode::kClosed;  // another release was first, and its cookie gets the answer
  }
  {
    const std::lock_guard lock(core_.keys_mutex);
    core_.releases[region] = cookie;
  }
  regions_.fetch_sub(1, std::memory_order_relaxed);
  registered_bytes_.fetch_sub(length, std::memory_order_relaxed);
  core_.control.post([this, slot] {
    {
      const Moment moment(core_);
      core_.release_started(slot);
    }
    core_.unpin_region(slot);
  });
  return {};
}

Status NativeEngine::submit_connect(uint64_t cookie, std::string_view bytes) {
  if (core_.closing.load(std::memory_order_acquire)) return StatusCode::kClosed;
  AddressBlob blob;
  if (!decode_address(bytes, &blob)) return StatusCode::kInvalidArgument;
  core_.control.post([this, cookie, address = std::string(bytes), blob] {
    {
      const Moment moment(core_);
      core_.connect_to(cookie, blob, address);
    }
  });
  return {};
}

Status NativeEngine::submit_disconnect(uint64_t cookie, PeerId id) {
  if (core_.closing.load(std::memory_order_acquire)) return StatusCode::kClosed;
  core_.control.post([this, cookie, id] {
    {
      const Moment moment(core_);
      Peer* peer = core_.find_peer(id);
      if (peer != nullptr) {
        if (peer->state == PeerState::kConnected) {
          core_.send_message(*peer, 0, MessageType::kBye, 0, {});
          core_.flush_outgoing();
        }
        core_.give_up(*peer, StatusCode::kClosed, PeerState::kDisconnected);
      }
      core_.publish({.cookie = cookie,
                     .kind = CompletionKind::kControl,
                     .status = core_.peers.existed(id) ? Status() : Status(StatusCode::kInvalidArgument),
                     .value = id});
    }
  });
  return {};
}

Status NativeEngine::submit_close(uint64_t cookie, bool cancel_unposted) {
  const bool again = core_.closing.exchange(true, std::memory_order_acq_rel);
  if (again && !cancel_unposted) return StatusCode::kClosed;
  // Twice: what was released before lets go of its region in a job of its own.
  core_.control.post(
      [=, this] { core_.control.post([=, this] { close_behind_waits(cookie, again, cancel_unposted); }); });
  return {};
}

// What waits for peers is answered first; each of these waits has its deadline.
void NativeEngine::close_behind_waits(uint64_t cookie, bool again, bool cancel_unposted) {
  if (core_.rail_calls != 0)
    return core_.control.post_later(Pauses::kFirstNs,
                                    [=, this] { close_behind_waits(cookie, again, cancel_unposted); });
  const Moment moment(core_);
  if (again)
    core_.hurry_close();
  else
    core_.begin_close(cookie, cancel_unposted);
}

Status NativeEngine::region_info(RegionId region, RegionInfo* out) const {
  RegionTable::Slot* slot = core_.regions.pin(region);
  if (slot == nullptr) return StatusCode::kClosed;
  const RegionEntry& entry = slot->value;
  out->base = entry.base;
  out->length = entry.length;
  out->device = entry.device;
  out->access = entry.access;
  out->refused = entry.refused;
  {
    const std::lock_guard lock(core_.keys_mutex);
    out->generation = entry.generation;
    out->quarantined = entry.zombies != 0;
  }
  core_.unpin_region(slot);
  return {};
}

Status NativeEngine::region_key(RegionId region, uint32_t access, uint64_t offset, uint64_t length, bool strict,
                                std::string* out) const {
  RegionTable::Slot* slot = core_.regions.pin(region);
  if (slot == nullptr) return StatusCode::kClosed;
  RegionEntry& entry = slot->value;
  Status status;
  if ((access & ~entry.access) != 0) {
    status = StatusCode::kAccessDenied;
  } else if (offset > entry.length || length > entry.length - offset || (strict && length == 0)) {
    status = StatusCode::kOutOfBounds;
  } else {
    KeyBlob blob;
    blob.incarnation = core_.incarnation;
    blob.region = region;
    blob.offset = offset;
    blob.length = length;
    blob.access = access;
    blob.address = core_.address();
    status = rail_keys_of(entry, {access, offset, length, strict}, &blob.rail_keys, &blob.generation);
    if (status.ok()) *out = encode_key(blob);
  }
  core_.unpin_region(slot);
  return status;
}

// Rails are asked without keys_mutex, which is taken under the engine lock elsewhere. Keys that they make before a revocation begins end
// with it, so they are good only while the generation is still the one that they are handed out with.
Status NativeEngine::rail_keys_of(RegionEntry& entry, const KeyScope& scope, std::vector<std::string>* keys,
                                  uint64_t* generation) const {
  std::vector<std::string> known;  // an empty one: that rail does not carry the memory
  {
    const std::lock_guard lock(core_.keys_mutex);
    if (entry.revoking != 0) return StatusCode::kBusy;
    entry.exported = true;
    *generation = entry.generation;
    *keys = entry.rail_keys[scope.access];
    if (!scope.strict && !keys->empty()) return {};
    known = entry.rail_keys[entry.access];
  }
  std::vector<std::string> made(known.size());
  Status status = StatusCode::kUnsupported;  // no rail can enforce it
  for (uint32_t rail = 0; rail < made.size(); ++rail) {
    if (known[rail].empty() || !entry.memory[rail]) continue;
    const Status narrowed =
        core_.at_rail(rail, [&](Rail& at) { return at.narrow_key(*entry.memory[rail], scope, &made[rail]); });
    if (narrowed.ok()) status = {};
    if (!narrowed.ok() && narrowed.code != StatusCode::kUnsupported) return narrowed;
  }
  if (!status.ok()) return status;
  const std::lock_guard lock(core_.keys_mutex);
  if (entry.generation != *generation) return StatusCode::kBusy;
  if (!scope.strict) entry.rail_keys[scope.access] = made;
  *keys = std::move(made);
  return {};
}

Status NativeEngine::open_key(std::string_view bytes, KeyId* out, KeyInfo* info) {
  if (core_.closing.load(std::memory_order_acquire)) return StatusCode::kClosed;
  KeyBlob blob;
  if (!decode_key(bytes, &blob)) return StatusCode::kInvalidArgument;
  *info = {blob.incarnation, blob.region, blob.generation,
           blob.length,      blob.access, static_cast<uint32_t>(blob.rail_keys.size())};
  *out = core_.keys.insert([&](RemoteKey& key) {
    key.incarnation = blob.incarnation;
    key.region = blob.region;
    key.generation = blob.generation;
    key.offset = blob.offset;
    key.length = blob.length;
    key.access = blob.access;
    key.rail_keys = std::move(blob.rail_keys);
    key.address = std::move(blob.address);
    key.opened_ns = now_ns();
  });
  return *out == 0 ? StatusCode::kBusy : StatusCode::kOk;
}

void NativeEngine::close_key(KeyId key) {
  bool closed = false;
  if (core_.keys.close(key, &closed)) {
    KeyTable::Slot* slot = core_.keys.find(key);
    core_.control.post([this, slot] { core_.end_key(slot); });
  }
}

PeerId NativeEngine::peer_of_key(KeyId key) const {
  KeyTable::Slot* slot = core_.keys.pin(key);
  if (slot == nullptr) return 0;
  PeerId id = 0;
  {
    EngineLock::Caller caller(core_.engine_lock);
    const std::lock_guard lock(caller);
    const auto known = core_.peer_of_incarnation.find(slot->value.incarnation);
    if (known != core_.peer_of_incarnation.end() && !known->second->disconnected_here()) id = known->second->id;
  }
  core_.unpin_key(slot);
  return id;
}

std::shared_ptr<uint8_t> NativeEngine::key_memory(KeyId id, uint64_t* length) const {
  KeyTable::Slot* slot = core_.keys.pin(id);
  if (slot == nullptr) return nullptr;
  std::shared_ptr<uint8_t> mapped;
  {
    EngineLock::Caller caller(core_.engine_lock);
    const std::lock_guard lock(caller);
    const RemoteKey& key = slot->value;
    if (key.attach == AttachState::kAttached && !key.stale && (key.access & kAccessRemoteWrite) != 0)
      for (size_t lane = 0; lane < key.lanes.size() && mapped == nullptr; ++lane)
        if (key.lanes[lane] != nullptr && core_.rails[key.peer->lanes[lane].rail]->capabilities.maps)
          mapped = key.lanes[lane]->mapped(key.offset, key.length);
    *length = key.length;
  }
  core_.unpin_key(slot);
  return mapped;
}

}  // namespace asyncfabric
