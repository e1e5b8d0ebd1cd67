// copy_loop.cc: one thread copying memory, plain and with streaming stores, whole and page by page; and through the kernel with
// process_vm_writev. Runs on the calling thread. These are ceilings, so each uses the widest store that the processor has.
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>

#include "asyncfabric/bench.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace asyncfabric::bench {
namespace {

using Copy = void (*)(void* target, const void* source, uint64_t bytes);

void copy_plain(void* target, const void* source, uint64_t bytes) { std::memcpy(target, source, bytes); }

#if defined(__x86_64__)

// Bytes before the first aligned store and after the last one go through memcpy: streaming stores need aligned targets.
struct Span {
  uint64_t head;
  uint64_t body;
};

Span align_target(const void* target, uint64_t bytes, uint64_t block) {
  const uint64_t head = std::min<uint64_t>((64 - reinterpret_cast<uintptr_t>(target) % 64) % 64, bytes);
  return {head, (bytes - head) / block * block};
}

// One body for all widths: STORE and LOAD are the intrinsics, VECTOR the register.
#define ASYNCFABRIC_STREAMING_COPY(NAME, TARGET, VECTOR, LOAD, STORE)                           \
  __attribute__((target(TARGET))) void NAME(void* target, const void* source, uint64_t bytes) { \
    constexpr uint64_t kBlock = 4 * sizeof(VECTOR);                                             \
    const Span span = align_target(target, bytes, kBlock);                                      \
    auto* to = static_cast<uint8_t*>(target);                                                   \
    const auto* from = static_cast<const uint8_t*>(source);                                     \
    std::memcpy(to, from, span.head);                                                           \
    to += span.head;                                                                            \
    from += span.head;                                                                          \
    for (const uint8_t* end = from + span.body; from != end; from += kBlock, to += kBlock) {    \
      const VECTOR a = LOAD(reinterpret_cast<const VECTOR*>(from));                             \
      const VECTOR b = LOAD(reinterpret_cast<const VECTOR*>(from) + 1);                         \
      const VECTOR c = LOAD(reinterpret_cast<const VECTOR*>(from) + 2);                         \
      const VECTOR d = LOAD(reinterpret_cast<const VECTOR*>(from) + 3);                         \
      STORE(reinterpret_cast<VECTOR*>(to), a);                                                  \
      STORE(reinterpret_cast<VECTOR*>(to) + 1, b);                                              \
      STORE(reinterpret_cast<VECTOR*>(to) + 2, c);                                              \
      STORE(reinterpret_cast<VECTOR*>(to) + 3, d);                                              \
    }                                                                                           \
    std::memcpy(to, from, bytes - span.head - span.body);                                       \
  }

ASYNCFABRIC_STREAMING_COPY(copy_sse2, "sse2", __m128i, _mm_loadu_si128, _mm_stream_si128)
ASYNCFABRIC_STREAMING_COPY(copy_avx2, "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256)
ASYNCFABRIC_STREAMING_COPY(copy_avx512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512)
#undef ASYNCFABRIC_STREAMING_COPY

struct Streaming {
  Copy copy;
  const char* name;
};

Streaming streaming() {
  if (__builtin_cpu_supports("avx512f")) return {copy_avx512, "avx512"};
  if (__builtin_cpu_supports("avx2")) return {copy_avx2, "avx2"};
  return {copy_sse2, "sse2"};
}

// Streaming stores are weakly ordered: without the fence the clock could stop before the bytes are in memory.
void fence() { _mm_sfence(); }

#else

struct Streaming {
  Copy copy;
  const char* name;
};
Streaming streaming() { return {copy_plain, "none"}; }
void fence() {}

#endif

Copy choose(CopyKind kind) { return kind == CopyKind::kPlain ? copy_plain : streaming().copy; }

LimitResult finished(uint64_t started) { return {0, monotonic_ns() - started, started}; }
LimitResult failed(int error, uint64_t started) { return {error, monotonic_ns() - started, started}; }

// process_vm_writev may move less than asked: the rest is sent again from where it stopped, as a careful program would.
int write_all(pid_t pid, uint64_t target, const uint8_t* source, uint64_t bytes) {
  while (bytes > 0) {
    iovec local{const_cast<uint8_t*>(source), bytes};
    iovec remote{reinterpret_cast<void*>(target), bytes};
    const ssize_t moved = process_vm_writev(pid, &local, 1, &remote, 1, 0);
    if (moved < 0) return errno;
    if (moved == 0) return EIO;
    source += moved;
    target += static_cast<uint64_t>(moved);
    bytes -= static_cast<uint64_t>(moved);
  }
  return 0;
}

}  // namespace

uint64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

const char* non_temporal_kind() { return streaming().name; }

LimitResult copy_loop(CopyKind kind, void* target, const void* source, uint64_t region_bytes, uint64_t op_bytes,
                      uint64_t count) {
  const Copy copy = choose(kind);
  const uint64_t slots = region_bytes / op_bytes;
  const uint64_t started = monotonic_ns();
  for (uint64_t i = 0, slot = 0; i < count; ++i, slot = slot + 1 == slots ? 0 : slot + 1) {
    copy(static_cast<uint8_t*>(target) + slot * op_bytes, static_cast<const uint8_t*>(source) + slot * op_bytes,
         op_bytes);
  }
  fence();
  return finished(started);
}

LimitResult copy_pages(CopyKind kind, void* target, const void* source, const int64_t* target_pages,
                       const int64_t* source_pages, uint64_t pages, uint64_t page_bytes, uint64_t rounds) {
  const Copy copy = choose(kind);
  const uint64_t started = monotonic_ns();
  for (uint64_t round = 0; round < rounds; ++round) {
    for (uint64_t i = 0; i < pages; ++i) {
      copy(static_cast<uint8_t*>(target) + static_cast<uint64_t>(target_pages[i]) * page_bytes,
           static_cast<const uint8_t*>(source) + static_cast<uint64_t>(source_pages[i]) * page_bytes, page_bytes);
    }
    fence();
  }
  return finished(started);
}

LimitResult cma_loop(int32_t pid, uint64_t target_address, const void* source, uint64_t region_bytes, uint64_t op_bytes,
                     uint64_t count) {
  const uint64_t slots = region_bytes / op_bytes;
  const uint64_t started = monotonic_ns();
  for (uint64_t i = 0, slot = 0; i < count; ++i, slot = slot + 1 == slots ? 0 : slot + 1) {
    const int error = write_all(pid, target_address + slot * op_bytes,
                                static_cast<const uint8_t*>(source) + slot * op_bytes, op_bytes);
    if (error != 0) return failed(error, started);
  }
  return finished(started);
}

LimitResult cma_pages(int32_t pid, uint64_t target_address, const void* source, const int64_t* target_pages,
                      const int64_t* source_pages, uint64_t pages, uint64_t page_bytes, uint64_t rounds) {
  constexpr uint64_t kBatch = IOV_MAX;
  iovec local[kBatch];
  iovec remote[kBatch];
  const uint64_t started = monotonic_ns();
  for (uint64_t round = 0; round < rounds; ++round) {
    for (uint64_t first = 0; first < pages; first += kBatch) {
      const uint64_t batch = std::min(kBatch, pages - first);
      for (uint64_t i = 0; i < batch; ++i) {
        const auto from = static_cast<uint64_t>(source_pages[first + i]) * page_bytes;
        const auto to = static_cast<uint64_t>(target_pages[first + i]) * page_bytes;
        local[i] = {const_cast<uint8_t*>(static_cast<const uint8_t*>(source)) + from, page_bytes};
        remote[i] = {reinterpret_cast<void*>(target_address + to), page_bytes};
      }
      const ssize_t moved = process_vm_writev(pid, local, batch, remote, batch, 0);
      if (moved < 0) return failed(errno, started);
      if (static_cast<uint64_t>(moved) != batch * page_bytes) return failed(EIO, started);
    }
  }
  return finished(started);
}

void allow_cma() {
#if defined(PR_SET_PTRACER)
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);  // fails without the Yama module, where nothing is restricted
#endif
}

}  // namespace asyncfabric::bench
