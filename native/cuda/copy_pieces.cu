// copy_pieces.cu: many small copies by the multiprocessors, in one launch: what a copy engine does at 64 pages per microsecond
// less. One block takes pieces in turns; all addresses and lengths are multiples of 16. `make ptx` turns this file into
// native/src/providers/cuda/_generated/kernel_text.h, which is what the library carries: no CUDA compiler is needed to build it.
#include <cstdint>

constexpr uint32_t kStretches = 16;

struct Piece {
  uint64_t target;
  uint64_t source;
  uint64_t bytes;
};

// Pages of one size: offsets that count from `target` and `source`.
struct alignas(16) Page {
  uint64_t source;
  uint64_t target;
};

struct PageStretch {
  const Page* pages;
  uint64_t target;
  uint64_t source;
  uint64_t count;
  uint64_t page_bytes;
};

struct Stretches {
  PageStretch stretch[kStretches];
};

__device__ __forceinline__ void copy(uint64_t to, uint64_t from, uint64_t bytes) {
  constexpr uint32_t kUnroll = 4;
  uint4* target = reinterpret_cast<uint4*>(to);
  const uint4* source = reinterpret_cast<const uint4*>(from);
  const uint32_t words = static_cast<uint32_t>(bytes / sizeof(uint4));
  uint32_t at = threadIdx.x;
  for (; at + (kUnroll - 1) * blockDim.x < words; at += kUnroll * blockDim.x) {
    uint4 values[kUnroll];
#pragma unroll
    for (uint32_t i = 0; i < kUnroll; ++i) values[i] = __ldcs(source + at + i * blockDim.x);
#pragma unroll
    for (uint32_t i = 0; i < kUnroll; ++i) __stcs(target + at + i * blockDim.x, values[i]);
  }
  for (; at < words; at += blockDim.x) __stcs(target + at, __ldcs(source + at));
}

// Lists lie in host memory: one thread's load per field reaches all lanes of a warp.
extern "C" __global__ void __launch_bounds__(512) copy_pieces(const Piece* pieces, uint32_t count) {
  for (uint32_t index = blockIdx.x; index < count; index += gridDim.x)
    copy(pieces[index].target, pieces[index].source, pieces[index].bytes);
}

// The stretches are arguments, which each block has at once; the pages behind them are read where the engine wrote them down.
extern "C" __global__ void __launch_bounds__(512)
    copy_pages(const __grid_constant__ Stretches stretches, const uint64_t count) {
  uint64_t first = 0;  // of the stretch
  uint32_t which = 0;
  for (uint64_t index = blockIdx.x; index < count; index += gridDim.x) {
    while (index - first >= stretches.stretch[which].count) first += stretches.stretch[which++].count;
    const PageStretch& in = stretches.stretch[which];
    const Page page = in.pages[index - first];
    copy(in.target + page.target, in.source + page.source, in.page_bytes);
  }
}
