// engine_lock.h: decides which thread runs the engine. Exactly one thread at a time holds the engine lock and may touch engine state.
// The worker thread is the default; callers (a submitting thread while the worker sleeps, a thread inside spin_counter, the
// control thread) take it for a moment. A waiting caller goes first: the worker steps aside between two passes, and blocks
// while callers stay, so that a spinning caller on a small machine does not share its core with a spinning worker.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace asyncfabric {

class EngineLock {
 public:
  // Worker thread.
  void lock_as_worker() {
    while (callers_.load(std::memory_order_acquire) != 0) {
      const uint32_t calls = calls_.load(std::memory_order_relaxed);
      worker_waits_.store(true, std::memory_order_seq_cst);
      if (callers_.load(std::memory_order_seq_cst) != 0) calls_.wait(calls, std::memory_order_acquire);
      worker_waits_.store(false, std::memory_order_relaxed);
    }
    mutex_.lock();
  }
  bool caller_waits() const { return callers_.load(std::memory_order_relaxed) != 0; }
  void unlock() { mutex_.unlock(); }

  // A caller thread announces itself, then locks and unlocks as often as it wants, then leaves.
  class Caller {
   public:
    explicit Caller(EngineLock& lock) : lock_(lock) { lock_.callers_.fetch_add(1, std::memory_order_acq_rel); }
    ~Caller() {
      // notify_one() is a system call even if nobody waits. Either we see the flag, or the worker sees our leaving. A worker that was called
      // may be long without a core: who takes the flag down calls, and callers after it need not.
      if (lock_.callers_.fetch_sub(1, std::memory_order_seq_cst) != 1 ||
          !lock_.worker_waits_.load(std::memory_order_seq_cst) ||
          !lock_.worker_waits_.exchange(false, std::memory_order_seq_cst))
        return;
      lock_.calls_.fetch_add(1, std::memory_order_release);
      lock_.calls_.notify_one();
    }
    Caller(const Caller&) = delete;
    Caller& operator=(const Caller&) = delete;
    void lock() { lock_.mutex_.lock(); }
    bool try_lock() { return lock_.mutex_.try_lock(); }
    void unlock() { lock_.mutex_.unlock(); }

   private:
    EngineLock& lock_;
  };

 private:
  std::mutex mutex_;
  alignas(64) std::atomic<uint32_t> callers_{0};  // partner: callers count themselves, the worker waits for zero
  std::atomic<bool> worker_waits_{
      false};                       // partner: the worker raises it before it waits, the last caller takes it down
  std::atomic<uint32_t> calls_{0};  // what the worker sleeps on: callers_ may be the same again when it wakes
};

}  // namespace asyncfabric
