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

}  // namespace

std::string encode_key(const RegionKey& key) {
  ByteWriter out;
  out.put(kKeyMagic);
  out.put(key.slot);
  out.put(key.generation);
  return std::move(out.text());
}

Status decode_key(std::string_view bytes, RegionKey* out) {
  ByteReader in(bytes);
  const uint32_t magic = in.get<uint32_t>();
  const uint32_t slot = in.get<uint32_t>();
  const uint64_t generation = in.get<uint64_t>();
  if (!in.done() || magic != kKeyMagic || slot >= kMaxRegions || generation == 0) return StatusCode::kInvalidArgument;
  *out = {slot, generation};
  return {};
}

Regions::Regions(std::shared_ptr<Mapping> board)
    : board_(std::move(board)), next_generation_(random_word() >> 16 | 1) {}

void Regions::publish(uint32_t slot, const Held& held, std::string* key) {
  RegionSlot& words = shared(slot);
  words.base.store(held.base, std::memory_order_relaxed);
  words.length.store(held.length, std::memory_order_relaxed);
  words.traits.store(held.traits, std::memory_order_relaxed);
  const uint64_t generation = next_generation_++;
  words.generation.store(generation, std::memory_order_seq_cst);
  *key = encode_key({slot, generation});
}

Status Regions::add(const Memory& memory, std::vector<UniqueFd> files, uint32_t* slot, std::string* key) {
  if (memory.base == nullptr || memory.length == 0) return StatusCode::kInvalidArgument;
  Held held;
  held.base = reinterpret_cast<uint64_t>(memory.base);
  held.length = memory.length;
  if (held.base + held.length < held.base) return StatusCode::kInvalidArgument;
  held.traits = memory.access & (kAccessRemoteWrite | kAccessRemoteRead);
  held.used = true;
  held.files = std::move(files);
  if (held.files.empty() && memory.memfd >= 0) {
    held.files.emplace_back(fcntl(memory.memfd, F_DUPFD_CLOEXEC, 0));
    if (!held.files[0]) return {StatusCode::kNoMemory, errno};
  }
  if (!held.files.empty()) held.traits |= kTraitMemfd;
  if (memory.device != kHostDevice) held.traits |= kTraitDevice;
  const std::lock_guard lock(mutex_);
  held.traits |= next_serial_++ << kTraitSerial;
  if (free_.empty()) {
    if (held_.size() == kMaxRegions) return StatusCode::kNoMemory;
    free_.push_back(static_cast<uint32_t>(held_.size()));
    held_.emplace_back();
  }
  *slot = free_.back();
  free_.pop_back();
  publish(*slot, held, key);
  held_[*slot] = std::move(held);
  return {};
}

Status Regions::revoke(uint32_t slot, uint64_t deadline_ns, const TakeCensus& census, std::string* new_key) {
  shared(slot).generation.store(0, std::memory_order_seq_cst);
  if (!drain(slot, deadline_ns, census)) return StatusCode::kDrainTimeout;  // stays closed; revoking again may succeed
  const std::lock_guard lock(mutex_);
  publish(slot, held_[slot], new_key);
  return {};
}

Status Regions::remove(uint32_t slot, uint64_t deadline_ns, const TakeCensus& census) {
  shared(slot).generation.store(0, std::memory_order_seq_cst);
  if (!drain(slot, deadline_ns, census)) return StatusCode::kDrainTimeout;
  const std::lock_guard lock(mutex_);
  if (!held_[slot].used) return {};
  shared(slot).traits.store(0, std::memory_order_release);  // who keeps a mapping of the registration sees its end
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
  }
  for (const uint32_t slot : used) shared(slot).generation.store(0, std::memory_order_seq_cst);
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

Status Regions::file(uint32_t slot, uint64_t generation, uint32_t part, UniqueFd* out) const {
  const std::lock_guard lock(mutex_);
  if (slot >= held_.size() || generation == 0 || shared(slot).generation.load(std::memory_order_seq_cst) != generation)
    return StatusCode::kStaleKey;
  if (part >= held_[slot].files.size()) return StatusCode::kInvalidArgument;
  *out = UniqueFd(fcntl(held_[slot].files[part].get(), F_DUPFD_CLOEXEC, 0));
  return *out ? Status() : Status(StatusCode::kNoMemory, errno);
}

Regions::Access::Access(Regions& regions, uint32_t slot, uint64_t generation, uint64_t offset, uint64_t length,
                        uint32_t right)
    : regions_(regions) {
  if (slot >= kMaxRegions || generation == 0) {
    status_ = StatusCode::kInvalidArgument;
    return;
  }
  regions_.own_slot_.store(slot + 1, std::memory_order_seq_cst);
  const RegionSlot& words = regions_.shared(slot);
  if (words.generation.load(std::memory_order_seq_cst) != generation) {
    status_ = StatusCode::kStaleKey;
    return;
  }
  const uint64_t size = words.length.load(std::memory_order_relaxed);
  if (offset > size || length > size - offset) {
    status_ = StatusCode::kOutOfBounds;
  } else if ((words.traits.load(std::memory_order_relaxed) & right) == 0 ||
             (words.traits.load(std::memory_order_relaxed) & kTraitDevice) != 0) {
    status_ = StatusCode::kAccessDenied;
  } else {
    data_ = reinterpret_cast<uint8_t*>(words.base.load(std::memory_order_relaxed)) + offset;
  }
}

}  // namespace asyncfabric::local
