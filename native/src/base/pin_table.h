// pin_table.h: objects named by handles that any thread may pin for a moment without a lock, and that go away only when
// nobody holds a pin. Used for regions (an op pins the memory it touches) and for keys.
// One 64-bit word per slot states everything: generation (31 bits) | free | open | pins (31 bits). A pin attempt on a stale
// handle never looks at the object.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace asyncfabric {

template <class T>
class PinTable {
 public:
  struct Slot {
    std::atomic<uint64_t> word{kFree};  // partner: pin, unpin, close and insert all update it atomically
    T value;
    uint64_t handle = 0;
  };

  // Makes a new open object. `fill(T&)` runs before anybody can pin it. 0: the table is full.
  template <class Fill>
  uint64_t insert(Fill fill) {
    const std::lock_guard lock(mutex_);
    uint32_t index;
    if (!free_.empty()) {
      index = free_.back();
      free_.pop_back();
    } else {
      index = next_;
      if (index >= kMaxSlots) return 0;
      if (chunks_[index / kChunk].load(std::memory_order_relaxed) == nullptr) {
        owned_.push_back(std::make_unique<std::array<Slot, kChunk>>());
        chunks_[index / kChunk].store(owned_.back().get(), std::memory_order_release);
      }
      ++next_;
    }
    Slot& slot = at(index);
    const uint64_t generation = ((slot.word.load(std::memory_order_relaxed) >> kGenerationShift) + 1) & kGenerationMask;
    slot.handle = generation << 32 | (index + 1);
    fill(slot.value);
    slot.word.store(generation << kGenerationShift | kOpen, std::memory_order_release);
    return slot.handle;
  }

  // Null: stale or closed. Every success needs one unpin. A compare-and-swap and not an add that is taken back: such an add
  // could be the last thing that holds a closed object, and nobody would own its end.
  Slot* pin(uint64_t handle) {
    Slot* slot = find(handle);
    if (slot == nullptr) return nullptr;
    uint64_t word = slot->word.load(std::memory_order_acquire);
    do {
      if (!matches(word, handle) || (word & kOpen) == 0) return nullptr;
    } while (!slot->word.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel, std::memory_order_acquire));
    return slot;
  }

  // One more, by somebody who holds one.
  void add_pin(Slot* slot) { slot->word.fetch_add(1, std::memory_order_acq_rel); }

  // True exactly once per object: it is closed and this was the last pin, so the caller now owns its end
  // and must call erase() when done.
  bool unpin(Slot* slot) {
    const uint64_t word = slot->word.fetch_sub(1, std::memory_order_acq_rel) - 1;
    return claim_end(slot, word);
  }

  // No new pins. True when the caller owns the end now (nobody held a pin). `closed` states whether this call closed it.
  bool close(uint64_t handle, bool* closed) {
    *closed = false;
    Slot* slot = find(handle);
    if (slot == nullptr) return false;
    uint64_t word = slot->word.load(std::memory_order_acquire);
    do {
      if (!matches(word, handle) || (word & kOpen) == 0) return false;
    } while (
        !slot->word.compare_exchange_weak(word, word & ~kOpen, std::memory_order_acq_rel, std::memory_order_acquire));
    *closed = true;
    return claim_end(slot, word & ~kOpen);
  }

  void erase(Slot* slot) {
    slot->value = T{};
    const std::lock_guard lock(mutex_);
    free_.push_back(static_cast<uint32_t>(slot->handle) - 1);
  }

  // For owners of the end and for scans under the owner's own lock: no pin is taken.
  Slot* find(uint64_t handle) const {
    const uint32_t index = static_cast<uint32_t>(handle) - 1;
    if (index >= kMaxSlots) return nullptr;
    std::array<Slot, kChunk>* chunk = chunks_[index / kChunk].load(std::memory_order_acquire);
    return chunk == nullptr ? nullptr : &(*chunk)[index % kChunk];
  }

  // Slots whose object lives, open or on its way out. The caller keeps objects from ending meanwhile.
  template <class Visit>
  void for_each(Visit visit) {
    const std::lock_guard lock(mutex_);
    for (uint32_t index = 0; index < next_; ++index)
      if ((at(index).word.load(std::memory_order_acquire) & kFree) == 0) visit(at(index));
  }

 private:
  static constexpr uint32_t kChunk = 64;
  static constexpr uint32_t kMaxSlots = 1u << 18;
  static constexpr int kGenerationShift = 33;
  static constexpr uint64_t kGenerationMask = 0x7fffffff;
  static constexpr uint64_t kFree = 1ull << 32;  // nobody owns an end here
  static constexpr uint64_t kOpen = 1ull << 31;
  static constexpr uint64_t kPinMask = kOpen - 1;

  static bool matches(uint64_t word, uint64_t handle) {
    return (word >> kGenerationShift) == (handle >> 32) && (word & kFree) == 0;
  }
  static bool claim_end(Slot* slot, uint64_t word) {
    while ((word & (kOpen | kFree | kPinMask)) == 0)
      if (slot->word.compare_exchange_weak(word, word | kFree, std::memory_order_acq_rel, std::memory_order_acquire))
        return true;
    return false;
  }
  Slot& at(uint32_t index) { return (*chunks_[index / kChunk].load(std::memory_order_relaxed))[index % kChunk]; }

  std::mutex mutex_;  // guards insert and erase only
  std::vector<uint32_t> free_;
  uint32_t next_ = 0;
  std::vector<std::unique_ptr<std::array<Slot, kChunk>>> owned_;
  std::array<std::atomic<std::array<Slot, kChunk>*>, kMaxSlots / kChunk> chunks_{};
};

}  // namespace asyncfabric
