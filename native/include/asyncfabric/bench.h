// bench.h: the machine's own ceilings as bare loops, for the Cython border. What a fabric is compared with, in the same run.
// Every loop runs on the calling thread (the GIL is released by the border), allocates nothing and returns when it is done.
// Nothing here knows the engine; the loops that drive an Engine are in src/bench/engine_loop.h.
#pragma once

#include <cstdint>

namespace asyncfabric::bench {

enum class CopyKind : uint32_t {
  kPlain = 0,        // std::memcpy
  kNonTemporal = 1,  // streaming stores, the widest that this processor has; memcpy where it has none
};

// What a loop did. `error` is an errno, 0 when the loop finished.
struct LimitResult {
  int32_t error = 0;
  uint64_t elapsed_ns = 0;
  uint64_t started_ns = 0;  // CLOCK_MONOTONIC, so that the two ends of a loop can be put on one time line
};

const char* non_temporal_kind();  // "avx512", "avx2", "sse2" or "none"

// `count` copies of `op_bytes`, walking round a region of `region_bytes` at both ends.
LimitResult copy_loop(CopyKind kind, void* target, const void* source, uint64_t region_bytes, uint64_t op_bytes,
                      uint64_t count);

// One copy per page: target_pages[i] <- source_pages[i], the list walked `rounds` times.
LimitResult copy_pages(CopyKind kind, void* target, const void* source, const int64_t* target_pages,
                       const int64_t* source_pages, uint64_t pages, uint64_t page_bytes, uint64_t rounds);

// process_vm_writev into process `pid`, otherwise as copy_loop.
LimitResult cma_loop(int32_t pid, uint64_t target_address, const void* source, uint64_t region_bytes, uint64_t op_bytes,
                     uint64_t count);

// process_vm_writev of page lists, as many pages in one call as the kernel takes.
LimitResult cma_pages(int32_t pid, uint64_t target_address, const void* source, const int64_t* target_pages,
                      const int64_t* source_pages, uint64_t pages, uint64_t page_bytes, uint64_t rounds);

// Lets any process of this user write here with process_vm_writev, where the kernel restricts that.
void allow_cma();

// One stream over a connected blocking socket: the sender ends when the receiver has acknowledged the last byte.
LimitResult stream_send(int32_t socket, const void* source, uint64_t region_bytes, uint64_t op_bytes, uint64_t count);
LimitResult stream_receive(int32_t socket, void* target, uint64_t region_bytes, uint64_t total_bytes);

// Wake-up round trips between two processes over two eventfds (blocking ones). `samples_ns` has room for `count`.
LimitResult eventfd_ping(int32_t out, int32_t in, uint64_t count, uint64_t* samples_ns);
LimitResult eventfd_pong(int32_t out, int32_t in, uint64_t count);

// Round trips between two spinning threads of this process over two cache lines: states whether the cores are near or far now.
LimitResult spin_round_trips(uint64_t count, uint64_t* samples_ns);

uint64_t monotonic_ns();

}  // namespace asyncfabric::bench
