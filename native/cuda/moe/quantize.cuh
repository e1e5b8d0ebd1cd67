// quantize.cuh: bfloat16 tokens as fp8-e4m3 with a float scale for each block of 128 elements; the same bits as asyncfabric/moe/fp8.py makes
// on a CPU. A warp for each block.
#pragma once
#include <cuda_fp8.h>
#include "words.cuh"

namespace moe {

constexpr float kLargestFp8 = 448.0f;
constexpr float kLeastPeak = 1e-4f;

struct Quantize {
  const uint2* x;   // 4 elements
  uint32_t* bytes;  // of 4 elements
  float* scales;
  uint64_t blocks;
  uint32_t power_of_two, unused;
};

__device__ inline void quantize(const Quantize& go, uint64_t first, uint64_t stride) {
  const uint32_t lane = lane_of();
  for (uint64_t block = first; block < go.blocks; block += stride) {
    const uint2 bits = go.x[block * 32 + lane];
    float values[4] = {__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000u),
                       __uint_as_float(bits.y << 16), __uint_as_float(bits.y & 0xffff0000u)};
    // Numbers that are not negative are ordered as their bits are.
    float peak = fmaxf(fmaxf(fabsf(values[0]), fabsf(values[1])), fmaxf(fabsf(values[2]), fabsf(values[3])));
    peak = __uint_as_float(__reduce_max_sync(kAll, __float_as_uint(peak)));
    float scale = __fdiv_rn(fmaxf(peak, kLeastPeak), kLargestFp8);
    if (go.power_of_two) scale = __uint_as_float((__float_as_uint(scale) + 0x7fffffu) & 0x7f800000u);
    uint32_t packed = 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t byte = __nv_cvt_float_to_fp8(__fdiv_rn(values[i], scale), __NV_SATFINITE, __NV_E4M3);
      packed |= byte << 8 * i;
    }
    go.bytes[block * 32 + lane] = packed;
    if (lane == 0) go.scales[block] = scale;
  }
}

}  // namespace moe
