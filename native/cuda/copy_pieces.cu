// copy_pieces.cu: many small copies by the multiprocessors, in one launch: what a copy engine does at 64 pages per microsecond
// less. One block takes pieces in turns; all addresses and lengths are multiples of 16. `make ptx` turns this file into
// native/src/providers/cuda/kernel_text.h, which is what the library carries: no CUDA compiler is needed to build it.
#include <cstdint>

struct Piece {
  uint64_t target;
  uint64_t source;
  uint64_t bytes;
};

extern "C" __global__ void __launch_bounds__(512) copy_pieces(const Piece* pieces, uint32_t count) {
  constexpr uint32_t kUnroll = 4;
  for (uint32_t index = blockIdx.x; index < count; index += gridDim.x) {
    // The list lies in host memory: one thread's load per field reaches all lanes of a warp.
    uint4* target = reinterpret_cast<uint4*>(pieces[index].target);
    const uint4* source = reinterpret_cast<const uint4*>(pieces[index].source);
    const uint32_t words = static_cast<uint32_t>(pieces[index].bytes / sizeof(uint4));
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
}
