// clock.h: monotonic time in nanoseconds. Any thread.
#pragma once

#include <cstdint>
#include <ctime>

namespace asyncfabric {

inline uint64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000ull + static_cast<uint64_t>(now.tv_nsec);
}

// The point in time when a duration is over; ~0 for those that never are.
inline uint64_t from_now(uint64_t duration_ns) {
  const uint64_t now = now_ns();
  return duration_ns > ~uint64_t{0} - now ? ~uint64_t{0} : now + duration_ns;
}

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace asyncfabric
