// cast.cuh: bfloat16 tokens as fp8-e4m3 with a float scale for each block of 128 elements; the same bits as asyncfabric/moe/fp8.py makes
// on a CPU.
#pragma once
#include <cuda_fp8.h>
#include "division.cuh"
#include "words.cuh"

namespace moe {

constexpr float kLargestFp8 = 448.0f;
constexpr float kLeastPeak = 1e-4f;
constexpr uint32_t kCastBytes = 256;  // of 128 elements, before

// A block of 128 elements: each lane has four of them, as bfloat16; they come back as fp8. All lanes find the block's scale.
__device__ inline uint32_t cast_block(uint2 bits, bool power_of_two, float& scale) {
  const float values[4] = {__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000u),
                           __uint_as_float(bits.y << 16), __uint_as_float(bits.y & 0xffff0000u)};
  // Numbers that are not negative are ordered as their bits are.
  float peak = fmaxf(fmaxf(fabsf(values[0]), fabsf(values[1])), fmaxf(fabsf(values[2]), fabsf(values[3])));
  peak = fmaxf(__uint_as_float(__reduce_max_sync(kAll, __float_as_uint(peak))), kLeastPeak);
  scale = divided(peak, kLargestFp8, 1.0f / kLargestFp8);
  if (power_of_two) scale = __uint_as_float((__float_as_uint(scale) + 0x7fffffu) & 0x7f800000u);
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(scale));
  uint32_t packed = 0;
#pragma unroll
  for (uint32_t i = 0; i < 4; i += 2) {
    const float2 two{divided(values[i], scale, reciprocal), divided(values[i + 1], scale, reciprocal)};
    packed |= static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, __NV_E4M3)) << 8 * i;
  }
  return packed;
}

// Of each lane: the scales of the blocks of its number, and of 32 more, of what is in a stage. There are not more of them.
struct StageScales {
  float first, second;
};

// Whole warp: casts what was loaded into the stage from bfloat16 to fp8, in place.
__device__ inline StageScales cast_stage(char* stage, uint32_t bytes, bool power_of_two) {
  constexpr uint32_t kTogether = 2;
  const uint32_t lane = lane_of(), blocks = bytes / kCastBytes;
  StageScales scales{};
#pragma unroll 1
  for (uint32_t first = 0; first < blocks; first += kTogether) {
    uint2 given[kTogether];
    uint32_t made[kTogether];
#pragma unroll
    for (uint32_t i = 0; i < kTogether; ++i)
      given[i] = first + i < blocks ? reinterpret_cast<const uint2*>(stage)[(first + i) * 32 + lane] : uint2{};
#pragma unroll
    for (uint32_t i = 0; i < kTogether; ++i) {
      float scale;
      made[i] = cast_block(given[i], power_of_two, scale);
      if (first + i == lane) scales.first = scale;
      if (first + i == lane + 32) scales.second = scale;
    }
    __syncwarp();  // all lanes have loaded what is stored to now
#pragma unroll
    for (uint32_t i = 0; i < kTogether; ++i)
      if (first + i < blocks) reinterpret_cast<uint32_t*>(stage)[(first + i) * 32 + lane] = made[i];
  }
  fence_stage_copies();
  __syncwarp();
  return scales;
}

}  // namespace moe
