// barrier.h: the one ordering that acquire and release cannot give: earlier stores are visible before later loads.
// Used where two sides each store a word and then look at the other's (news bit, sleep flag, hazard).
#pragma once

#include <atomic>

namespace asyncfabric::local {

// A locked add beats mfence, and ThreadSanitizer, which does not model fences, needs nothing here: data is ordered by
// the release and acquire of Entry.sequence.
inline void store_load_barrier() {
#if defined(__x86_64__)
  asm volatile("lock; addl $0, (%%rsp)" ::: "memory", "cc");
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace asyncfabric::local
