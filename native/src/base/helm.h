// helm.h: decides which thread runs the engine. Exactly one thread at a time holds the helm and may touch engine state.
// The worker thread is the default; guests (a submitting thread while the worker sleeps, a thread inside spin_counter, the
// control thread) take it for a moment. A waiting guest goes first: the worker steps aside between two passes, and blocks
// while guests stay, so that a spinning guest on a small machine does not share its core with a spinning worker.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace asyncfabric {

class Helm {
 public:
  // Worker thread.
  void lock_as_worker() {
    for (uint32_t guests = guests_.load(std::memory_order_acquire); guests != 0;
         guests = guests_.load(std::memory_order_acquire)) {
      worker_waits_.store(true, std::memory_order_seq_cst);
      guests_.wait(guests, std::memory_order_seq_cst);
      worker_waits_.store(false, std::memory_order_relaxed);
    }
    mutex_.lock();
  }
  bool guest_waits() const { return guests_.load(std::memory_order_relaxed) != 0; }
  void unlock() { mutex_.unlock(); }

  // A guest announces itself, then locks and unlocks as often as it wants, then leaves.
  class Guest {
   public:
    explicit Guest(Helm& helm) : helm_(helm) { helm_.guests_.fetch_add(1, std::memory_order_acq_rel); }
    ~Guest() {
      // notify_all() is a system call even if nobody waits. Either we see the flag, or the worker's wait sees our leaving.
      if (helm_.guests_.fetch_sub(1, std::memory_order_seq_cst) == 1 &&
          helm_.worker_waits_.load(std::memory_order_seq_cst))
        helm_.guests_.notify_all();
    }
    Guest(const Guest&) = delete;
    Guest& operator=(const Guest&) = delete;
    void lock() { helm_.mutex_.lock(); }
    bool try_lock() { return helm_.mutex_.try_lock(); }
    void unlock() { helm_.mutex_.unlock(); }

   private:
    Helm& helm_;
  };

 private:
  std::mutex mutex_;
  alignas(64) std::atomic<uint32_t> guests_{0};  // partner: guests count themselves, the worker waits for zero
  std::atomic<bool> worker_waits_{false};        // partner: the worker sets it before it waits, the last guest looks
};

}  // namespace asyncfabric
