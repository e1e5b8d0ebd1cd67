// watch.h: 64-bit words that a GPU kernel or any thread stores to while the worker looks at them. The
// words lie in SharedWords. open, arm and close from any thread; look() under the engine lock.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "asyncfabric/types.h"
#include "engine/counters/words.h"

namespace asyncfabric {

class WatchTable {
 public:
  explicit WatchTable(SharedWords& words) {
    for (uint32_t slot = 0; slot < kWatches; ++slot) watches_[slot].word = words.watch(slot);
  }

  Status open(WatchId* id, uint64_t** word) {
    const std::lock_guard lock(mutex_);
    for (uint32_t slot = 0; slot < kWatches; ++slot) {
      Watch& watch = watches_[slot];
      if (watch.open) continue;
      watch.open = true;
      ++watch.opens;
      std::atomic_ref(*watch.word).store(0, std::memory_order_relaxed);
      watch.armed.store(false, std::memory_order_relaxed);
      *id = uint64_t{watch.opens} << 32 | (slot + 1);
      *word = watch.word;
      return {};
    }
    return StatusCode::kBusy;
  }

  Status arm(WatchId id, uint64_t cookie, uint64_t seen) {
    const std::lock_guard lock(mutex_);
    Watch* watch = find(id);
    if (watch == nullptr) return StatusCode::kClosed;
    watch->cookie.store(cookie, std::memory_order_relaxed);
    watch->seen.store(seen, std::memory_order_relaxed);
    if (!watch->armed.exchange(true, std::memory_order_seq_cst)) armed_.fetch_add(1, std::memory_order_seq_cst);
    return {};
  }

  // kBusy: the word holds less; kClosed: it is nobody's any more.
  Status at_least(WatchId id, uint64_t value) {
    const std::lock_guard lock(mutex_);
    const Watch* watch = find(id);
    if (watch == nullptr) return StatusCode::kClosed;
    return std::atomic_ref(*watch->word).load(std::memory_order_acquire) >= value ? StatusCode::kOk : StatusCode::kBusy;
  }

  void close(WatchId id) {
    const std::lock_guard lock(mutex_);
    Watch* watch = find(id);
    if (watch == nullptr) return;
    watch->open = false;
    if (watch->armed.exchange(false, std::memory_order_seq_cst)) armed_.fetch_sub(1, std::memory_order_seq_cst);
  }

  bool any_armed() const { return armed_.load(std::memory_order_seq_cst) != 0; }

  // Under the engine lock. Calls changed(cookie, value) for each armed word that differs from what its watcher saw, and disarms it.
  template <class Changed>
  size_t look(Changed changed) {
    if (!any_armed()) return 0;
    size_t count = 0;
    for (Watch& watch : watches_) {
      if (!watch.armed.load(std::memory_order_acquire)) continue;
      const uint64_t value = std::atomic_ref(*watch.word).load(std::memory_order_acquire);
      if (value == watch.seen.load(std::memory_order_relaxed)) continue;
      const uint64_t cookie = watch.cookie.load(std::memory_order_relaxed);
      if (!watch.armed.exchange(false, std::memory_order_seq_cst)) continue;  // closed meanwhile
      armed_.fetch_sub(1, std::memory_order_seq_cst);
      changed(cookie, value);
      ++count;
    }
    return count;
  }

 private:
  static constexpr uint32_t kWatches = SharedWords::kWatchWords;
  struct alignas(64) Watch {
    uint64_t* word = nullptr;  // stored by kernels and threads, loaded with acquire
    std::atomic<uint64_t> seen{0};
    std::atomic<uint64_t> cookie{0};
    std::atomic<bool> armed{false};  // partner: arm sets, look and close clear
    bool open = false;               // mutex
    uint32_t opens = 0;              // mutex
  };

  Watch* find(WatchId id) {
    const uint32_t slot = static_cast<uint32_t>(id) - 1;
    return slot < kWatches && watches_[slot].open && watches_[slot].opens == id >> 32 ? &watches_[slot] : nullptr;
  }

  std::mutex mutex_;
  std::atomic<uint32_t> armed_{0};
  std::array<Watch, kWatches> watches_;
};

}  // namespace asyncfabric
