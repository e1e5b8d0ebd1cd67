// poll_turn.h: when threads of the program that poll run the engine instead of its worker. Any thread; a hint, so all of it is relaxed.
// A program that polls one call after the other keeps a core and steps the engine at each look. A worker that is awake beside it takes the
// engine lock from it and the core from its peer, and one that sleeps on armed rails is rung by each arrival. So while looks follow each
// other quickly the worker naps, rails unarmed; it looks by itself when no look has come for a moment. Nothing depends on the hint: a nap
// that should not be ends by itself.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace asyncfabric {

class PollTurn {
 public:
  static constexpr uint64_t kQuickNs = 50'000;  // between two looks of a program that does nothing else
  static constexpr uint64_t kKeepNs = 100'000;  // after the last look
  static constexpr uint64_t kNapNs = 250'000;   // of the worker; what comes when looks have ended waits so long at most
  static constexpr uint32_t kLooks = 3;
  // A program that shares its core looks late whenever the others had it: that halves what its looks have earned, and does not end its turn.
  static constexpr uint32_t kMostLooks = 64;
  static constexpr uint64_t kAwayNs = 10'000'000;

  // Before a look. True: looks follow each other quickly.
  bool begin(uint64_t now) {
    const uint64_t gap = now - looked_ns_.load(std::memory_order_relaxed);
    uint32_t looks = looks_.load(std::memory_order_relaxed);
    looks = gap < kQuickNs ? std::min(looks + 1, kMostLooks) : gap < kAwayNs ? looks / 2 : 0;
    looks_.store(looks, std::memory_order_relaxed);
    return looks >= kLooks;
  }

  // After a look.
  void end(uint64_t now, bool quick) {
    looked_ns_.store(now, std::memory_order_relaxed);
    if (quick) until_ns_.store(now + kKeepNs, std::memory_order_relaxed);
  }

  // A thread is about to sleep until something comes: the worker has to look again.
  void stop() {
    if (until_ns_.load(std::memory_order_relaxed) == 0) return;
    until_ns_.store(0, std::memory_order_relaxed);
    looks_.store(0, std::memory_order_relaxed);
  }

  // Whether pollers have the engine now. Nobody ever polled: no look at the clock.
  template <class Clock>
  bool held(Clock now) const {
    const uint64_t until = until_ns_.load(std::memory_order_relaxed);
    return until != 0 && now() < until;
  }

  bool napping() const { return napping_.load(std::memory_order_relaxed); }
  void nap(bool naps) { napping_.store(naps, std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> looked_ns_{0};
  std::atomic<uint64_t> until_ns_{0};
  std::atomic<uint32_t> looks_{0};
  std::atomic<bool> napping_{false};  // partner: the worker stores it with the engine lock, callers look
};

}  // namespace asyncfabric
