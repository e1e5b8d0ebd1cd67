// regions.cc: see regions.h.
#include "providers/local/memory/regions.h"

#include <fcntl.h>
#include <cerrno>
#include <ctime>

#include <utility>

#include "base/bytes.h"
#include "base/clock.h"
#include "providers/local/peers/identity.h"

namespace asyncfabric::local {
namespace {

constexpr uint32_t kKeyMagic = 0x4b4c4641;  // "AFLK"
constexpr int kSpins = 1000;                // about 20 us before a drain begins to nap
constexpr long kNapNs = 20'000;
constexpr uint32_t kRemote = kAccessRemoteWrite | kAccessRemoteRead;

}  // namespace

std::string encode_key(const RegionKey& key) {
  ByteWriter out;
  out.put(kKeyMagic);
  out.put(key.slot);
  out.put(key.word);
  return std::move(out.text());
}

Status decode_key(std::string_view bytes, RegionKey* out) {
  ByteReader in(bytes);
  const uint32_t magic = in.get<uint32_t>();
  const uint32_t slot = in.get<uint32_t>();
  const uint64_t word = in.get<uint64_t>();
  if (!in.done() || magic != kKeyMagic || slot >= kMaxRegions || word == 0) return StatusCode::kInvalidArgument;
  *out = {slot, word};
  return {};
}

// A mapping that can be written can be read, and a descriptor that was received can be opened again with more rights by whoever may open
// the file, which is the same user. So a file goes to who may write anyway, and to readers where nobody can write it: see seal_file().
bool Regions::Held::maps(const KeyScope& scope) const {
  if (files.empty() || scope.strict || scope.access == kAccessLocal) return false;
  return device || sealed || (scope.access & kAccessRemoteWrite) != 0;
}

std::string Regions::grant(uint32_t slot, const KeyScope& scope) {
  uint64_t& word = held_[slot].words[scope];
  if (word == 0) {
    do word = random_word();
    while (!grants_.try_emplace(word, Grant{slot, scope}).second);
  }
  return encode_key({slot, word});
}

void Regions::publish(uint32_t slot, std::string* key) {
  const Held& held = held_[slot];
  *key = grant(slot, {held.access, 0, held.length, false});
  shared(slot).mark.store(random_word(), std::memory_order_seq_cst);
}

// The mark first: what was shown before is checked against it, what is asked for later finds no grant.
void Regions::end_grants(uint32_t slot) {
  shared(slot).mark.store(0, std::memory_order_seq_cst);
  for (const auto& [scope, word] : held_[slot].words) grants_.erase(word);
  held_[slot].words.clear();
}

const Regions::Grant* Regions::find(const RegionKey& key) const {
  const auto found = grants_.find(key.word);
  return found == grants_.end() || found->second.slot != key.slot ? nullptr : &found->second;
}

Status Regions::add(const Memory& memory, std::vector<UniqueFd> files, uint32_t* slot, std::string* key) {
  if (memory.base == nullptr || memory.length == 0) return StatusCode::kInvalidArgument;
  Held held;
  held.base = reinterpret_cast<uint64_t>(memory.base);
  held.length = memory.length;
  if (held.base + held.length < held.base) return StatusCode::kInvalidArgument;
  held.access = memory.access & kRemote;
  held.used = true;
  held.device = memory.device != kHostDevice;
  if (held.access != kAccessLocal) held.files = std::move(files);
  if (held.files.empty() && memory.memfd >= 0 && !held.device && held.access != kAccessLocal) {
    held.files.emplace_back(fcntl(memory.memfd, F_DUPFD_CLOEXEC, 0));
    if (!held.files[0]) return {StatusCode::kNoMemory, errno};
    held.sealed = (held.access & kAccessRemoteWrite) == 0 && seal_file(memory.memfd);
  }
  const std::lock_guard lock(mutex_);
  if (free_.empty()) {
    if (held_.size() == kMaxRegions) return StatusCode::kNoMemory;
    free_.push_back(static_cast<uint32_t>(held_.size()));
    held_.emplace_back();
  }
  *slot = free_.back();
  free_.pop_back();
  held_[*slot] = std::move(held);
  shared(*slot).life.store(random_word(), std::memory_order_seq_cst);
  publish(*slot, key);
  return {};
}

Status Regions::narrow(uint32_t slot, const KeyScope& scope, std::string* key) {
  const std::lock_guard lock(mutex_);
  const Held& held = held_[slot];
  if ((scope.access & ~held.access) != 0) return StatusCode::kAccessDenied;
  if (scope.strict && (scope.offset > held.length || scope.length > held.length - scope.offset))
    return StatusCode::kOutOfBounds;
  if (scope.strict && held.device) return StatusCode::kUnsupported;
  if (shared(slot).mark.load(std::memory_order_relaxed) == 0) return StatusCode::kBusy;
  *key = grant(slot, scope.strict ? scope : KeyScope{scope.access, 0, held.length, false});
  return {};
}

Status Regions::revoke(uint32_t slot, uint64_t deadline_ns, const TakeCensus& census, std::string* new_key) {
  {
    const std::lock_guard lock(mutex_);
    end_grants(slot);
  }
  if (!drain(slot, deadline_ns, census)) return StatusCode::kDrainTimeout;  // stays closed; revoking again may succeed
  const std::lock_guard lock(mutex_);
  publish(slot, new_key);
  return {};
}

Status Regions::remove(uint32_t slot, uint64_t deadline_ns, const TakeCensus& census) {
  {
    const std::lock_guard lock(mutex_);
    end_grants(slot);
  }
  if (!drain(slot, deadline_ns, census)) return StatusCode::kDrainTimeout;
  const std::lock_guard lock(mutex_);
  if (!held_[slot].used) return {};
  shared(slot).life.store(0, std::memory_order_release);  // who keeps a mapping of the registration sees its end
  held_[slot] = Held();
  free_.push_back(slot);
  return {};
}

Status Regions::remove_all(uint64_t deadline_ns, const TakeCensus& census) {
  std::vector<uint32_t> used;
  {
    const std::lock_guard lock(mutex_);
    for (uint32_t slot = 0; slot < held_.size(); ++slot)
      if (held_[slot].used) used.push_back(slot);
    for (const uint32_t slot : used) end_grants(slot);
  }
  Status worst;
  for (const uint32_t slot : used)
    if (const Status status = remove(slot, deadline_ns, census); !status.ok()) worst = status;
  return worst;
}

bool Regions::drain(uint32_t slot, uint64_t deadline_ns, const TakeCensus& census) const {
  const SlotIdle idle = census();
  bool own_idle = false;
  for (int turn = 0;; ++turn) {
    own_idle = own_idle || own_slot_.load(std::memory_order_seq_cst) != slot + 1;
    if (own_idle && idle(slot)) return true;
    if (turn < kSpins) {
      cpu_pause();
      continue;
    }
    if (now_ns() >= deadline_ns) return false;
    const timespec nap{0, kNapNs};
    nanosleep(&nap, nullptr);
  }
}

Status Regions::show(const RegionKey& key, uint32_t part, Shown* out, UniqueFd* file) const {
  const std::lock_guard lock(mutex_);
  const Grant* const found = find(key);
  if (found == nullptr) return StatusCode::kStaleKey;
  const KeyScope& scope = found->scope;
  const Held& held = held_[key.slot];
  *out = {shared(key.slot).mark.load(std::memory_order_relaxed), shared(key.slot).life.load(std::memory_order_relaxed),
          held.base, held.length, scope.access};
  if (held.device) out->traits |= kTraitDevice;
  if (scope.strict || scope.access == kAccessLocal) {
    out->traits |= kTraitByOwner;
    out->base = 0;
  }
  if (!held.maps(scope)) return part == 0 ? Status() : Status(StatusCode::kInvalidArgument);
  if (part >= held.files.size()) return StatusCode::kInvalidArgument;
  *file = UniqueFd(fcntl(held.files[part].get(), F_DUPFD_CLOEXEC, 0));
  return *file ? Status() : Status(StatusCode::kNoMemory, errno);
}

// The slot is named first: a revocation that ends the grant before it is looked up refuses us, one that comes later waits for us.
Regions::Access::Access(Regions& regions, const RegionKey& key, uint64_t offset, uint64_t length, uint32_t right)
    : regions_(regions) {
  if (key.slot >= kMaxRegions || key.word == 0) {
    status_ = StatusCode::kInvalidArgument;
    return;
  }
  regions_.own_slot_.store(key.slot + 1, std::memory_order_seq_cst);
  const std::lock_guard lock(regions_.mutex_);
  const Grant* const found = regions_.find(key);
  if (found == nullptr) {
    status_ = StatusCode::kStaleKey;
    return;
  }
  const KeyScope& scope = found->scope;
  const Held& held = regions_.held_[key.slot];
  const uint64_t begin = scope.strict ? scope.offset : 0;
  const uint64_t end = scope.strict ? scope.offset + scope.length : held.length;
  if (offset < begin || offset > end || length > end - offset) {
    status_ = StatusCode::kOutOfBounds;
  } else if ((scope.access & right) == 0 || held.device) {
    status_ = StatusCode::kAccessDenied;
  } else {
    data_ = reinterpret_cast<uint8_t*>(held.base) + offset;
  }
}

}  // namespace asyncfabric::local
