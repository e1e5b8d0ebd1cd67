// spsc_ring.h: bounded ring of plain values, one producer (the holder of the engine lock) and one consumer at a time (the event loop thread).
// Carries completions. The producer publishes whole batches; the consumer takes batches.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace asyncfabric {

template <class T>
class SpscRing {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  explicit SpscRing(size_t at_least) {
    size_t capacity = 16;
    while (capacity < at_least) capacity *= 2;
    mask_ = capacity - 1;
    slots_ = std::make_unique_for_overwrite<T[]>(capacity);  // not touched until used
  }

  // Producer. False: full, nothing was written.
  bool stage(const T& value) {
    if (staged_ - seen_head_ > mask_) {
      seen_head_ = head_.load(std::memory_order_acquire);
      if (staged_ - seen_head_ > mask_) return false;
    }
    slots_[staged_++ & mask_] = value;
    return true;
  }

  bool has_staged() const { return staged_ != tail_.load(std::memory_order_relaxed); }

  // Producer. seq_cst: pairs with empty() after arming, so that producer and sleeper cannot both miss each other.
  void publish() { tail_.store(staged_, std::memory_order_seq_cst); }

  // Consumer.
  size_t take(T* out, size_t capacity) {
    const uint64_t tail = tail_.load(std::memory_order_acquire);
    uint64_t head = head_.load(std::memory_order_relaxed);
    size_t count = 0;
    while (head != tail && count < capacity) out[count++] = slots_[head++ & mask_];
    head_.store(head, std::memory_order_release);
    return count;
  }

  bool empty() const { return head_.load(std::memory_order_relaxed) == tail_.load(std::memory_order_seq_cst); }

 private:
  std::unique_ptr<T[]> slots_;
  uint64_t mask_ = 0;
  alignas(64) std::atomic<uint64_t> tail_{0};  // partner: producer stores, consumer loads
  uint64_t staged_ = 0;
  uint64_t seen_head_ = 0;
  alignas(64) std::atomic<uint64_t> head_{0};  // partner: consumer stores, producer loads
};

}  // namespace asyncfabric
