// trace.h: trace points that are always compiled in. Off: one relaxed load and a predicted branch. On: one clock read and one
// 32-byte store into a ring that keeps the newest events. Written by the holder of the engine lock, read by anybody through snapshot().
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "asyncfabric/types.h"
#include "base/clock.h"

namespace asyncfabric {

class Trace {
 public:
  void enable(bool on) { on_.store(on, std::memory_order_relaxed); }

  void point(TracePoint what, uint64_t subject, uint64_t value) {
    if (!on_.load(std::memory_order_relaxed)) return;
    const uint64_t at = next_.load(std::memory_order_relaxed);
    Cell& cell = ring_[at % kEvents];
    cell.time_ns.store(now_ns(), std::memory_order_relaxed);
    cell.subject.store(subject, std::memory_order_relaxed);
    cell.value.store(value, std::memory_order_relaxed);
    cell.what.store(static_cast<uint64_t>(what), std::memory_order_relaxed);
    next_.store(at + 1, std::memory_order_release);
  }

  // Oldest first. An event that is overwritten meanwhile may be mixed: traces are for people, not for decisions.
  std::vector<TraceEvent> snapshot() const {
    const uint64_t end = next_.load(std::memory_order_acquire);
    std::vector<TraceEvent> events;
    for (uint64_t at = end > kEvents ? end - kEvents : 0; at < end; ++at) {
      const Cell& cell = ring_[at % kEvents];
      events.push_back({cell.time_ns.load(std::memory_order_relaxed),
                        static_cast<TracePoint>(cell.what.load(std::memory_order_relaxed)),
                        cell.subject.load(std::memory_order_relaxed), cell.value.load(std::memory_order_relaxed)});
    }
    return events;
  }

 private:
  static constexpr uint64_t kEvents = 4096;
  struct Cell {
    std::atomic<uint64_t> time_ns, what, subject, value;  // relaxed: partner is snapshot()
  };
  std::atomic<bool> on_{false};
  std::atomic<uint64_t> next_{0};
  std::array<Cell, kEvents> ring_{};
};

}  // namespace asyncfabric
