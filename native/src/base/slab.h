// slab.h: fixed number of slots handed out and taken back without locks, by any thread. A slot's object is made the first
// time the slot is used and then kept, so its inner buffers stay warm. Handles carry a generation: a handle of a slot that
// went back is refused.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <new>

namespace asyncfabric {

template <class T>
class Slab {
 public:
  explicit Slab(uint32_t capacity) : capacity_(capacity), bytes_(sizeof(T) * capacity) {
    // Untouched pages cost nothing: a fabric that never has many ops in flight stays small.
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    slots_ = memory == MAP_FAILED ? nullptr : static_cast<T*>(memory);
    if (slots_ == nullptr) capacity_ = 0;
  }
  ~Slab() {
    for (uint32_t i = 0; i < used_.load(std::memory_order_acquire); ++i) slots_[i].~T();
    if (slots_ != nullptr) munmap(slots_, bytes_);
  }
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  // Null: all slots are in use. T needs: T(uint32_t slot), atomic<uint32_t> next_free, slot number in `slot`.
  T* take() {
    uint64_t head = free_.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(head) != kNone) {
      T& top = slots_[static_cast<uint32_t>(head)];
      const uint64_t next = ((head >> 32) + 1) << 32 | top.next_free.load(std::memory_order_relaxed);
      if (free_.compare_exchange_weak(head, next, std::memory_order_acq_rel, std::memory_order_acquire)) return &top;
    }
    uint32_t fresh = used_.load(std::memory_order_relaxed);
    while (fresh < capacity_)
      if (used_.compare_exchange_weak(fresh, fresh + 1, std::memory_order_relaxed))
        return new (&slots_[fresh]) T(fresh);
    return nullptr;
  }

  void give_back(T* item) {
    uint64_t head = free_.load(std::memory_order_relaxed);
    uint64_t next;
    do {
      item->next_free.store(static_cast<uint32_t>(head), std::memory_order_relaxed);
      next = ((head >> 32) + 1) << 32 | item->slot;
    } while (!free_.compare_exchange_weak(head, next, std::memory_order_acq_rel, std::memory_order_relaxed));
  }

  T& operator[](uint32_t slot) { return slots_[slot]; }
  const T& operator[](uint32_t slot) const { return slots_[slot]; }
  uint32_t capacity() const { return capacity_; }
  // A hint: another thread may be quicker.
  bool has_free() const {
    return static_cast<uint32_t>(free_.load(std::memory_order_acquire)) != kNone ||
           used_.load(std::memory_order_relaxed) < capacity_;
  }

  // May a handle name this slot? Only the thread that took a fresh slot knows its handle before the slot is made.
  bool exists(uint32_t slot) const { return slot < used_.load(std::memory_order_relaxed); }

 private:
  static constexpr uint32_t kNone = 0xffffffffu;
  uint32_t capacity_;
  size_t bytes_;
  T* slots_ = nullptr;
  alignas(64) std::atomic<uint64_t> free_{kNone};  // tag << 32 | slot; partner: take and give_back
  std::atomic<uint32_t> used_{0};
};

}  // namespace asyncfabric
