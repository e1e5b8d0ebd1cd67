// elements.cuh: what the kernels of weights do with one word or one number: bijections of checksums, float8, stored bits.
// The same bits as asyncfabric/weights/plan/formats.py and asyncfabric/weights/memory/checksums.py, with the reasons.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define AF_DEVICE __device__ __forceinline__
#else
#define AF_DEVICE inline  // for looking at the kernels on a processor
#endif

namespace weights {

constexpr uint32_t kFirst = 0x9E3779B1u;
constexpr uint32_t kSecond = 0x85EBCA77u;
constexpr uint32_t kOffset = 0x6A09E667u;
constexpr uint32_t kBlock = 128;
constexpr float kSmallestScale = 0x1p-126f;

AF_DEVICE uint64_t product(uint32_t word, uint32_t place) {
  uint32_t factor = (place + kOffset) * kFirst;
  factor ^= factor >> 15;
  factor *= kSecond;
  factor ^= factor >> 16;
  uint32_t mixed = (word + kOffset) * kFirst;
  mixed ^= mixed >> 15;
  return static_cast<uint64_t>(mixed) * (2 * static_cast<uint64_t>(factor) + 1);
}

AF_DEVICE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

AF_DEVICE float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Stored forms: `Bits` of an element, its value, and its size without the sign as bits that compare as numbers do.
struct Bfloat16 {
  using Bits = uint16_t;
  static constexpr uint32_t kSign = 0x8000u;
  static AF_DEVICE float value(uint32_t bits) { return float_of(bits << 16); }
  static AF_DEVICE float size(uint32_t bits) { return fabsf(value(bits)); }
};

struct Float16 {
  using Bits = uint16_t;
  static constexpr uint32_t kSign = 0x8000u;
  static AF_DEVICE float value(uint32_t bits) {
    const uint32_t size = bits & 0x7FFFu;
    const uint32_t sign = (bits & 0x8000u) << 16;
    if (size > 0x7C00u) return float_of(sign | 0x7FC00000u | (size & 0x3FFu) << 13);
    if (size == 0x7C00u) return float_of(sign | 0x7F800000u);
    if (size >= 0x0400u) return float_of(sign | ((size << 13) + (112u << 23)));
    const float tiny = static_cast<float>(size) * (1.0f / 16777216.0f);  // steps of 2**-24: exact
    return float_of(sign | bits_of(tiny));
  }
  static AF_DEVICE float size(uint32_t bits) {                        // of a finite number
    return float_of((bits & 0x7FFFu) << 13) * 5.192296858534828e33f;  // 2**112: exact
  }
};

struct Float32 {
  using Bits = uint32_t;
  static constexpr uint32_t kSign = 0x80000000u;
  static AF_DEVICE float value(uint32_t bits) { return float_of(bits); }
  static AF_DEVICE float size(uint32_t bits) { return fabsf(value(bits)); }
};

AF_DEVICE bool is_nan(float value) { return (bits_of(value) & 0x7FFFFFFFu) > 0x7F800000u; }
AF_DEVICE bool is_inf(float value) { return (bits_of(value) & 0x7FFFFFFFu) == 0x7F800000u; }

AF_DEVICE float divided(float value, float scale) {
#if defined(__CUDACC__)
  return __fdiv_rn(value, scale);
#else
  return value / scale;
#endif
}

AF_DEVICE uint32_t rounded(float value) {
#if defined(__CUDACC__)
  return __float2uint_rn(value);
#else
  return static_cast<uint32_t>(__builtin_rintf(value));
#endif
}

// A number divided by the scale of its block, as float8_e4m3fn: to nearest even, saturating at 448, NaN stays NaN.
AF_DEVICE uint32_t quantised(float value, float scale) {
  const float quotient = divided(value, scale);
  if (is_nan(quotient)) {
    const bool negative = is_nan(value) ? (bits_of(value) >> 31) != 0 : is_inf(value) && is_inf(scale);
    return negative ? 0xFFu : 0x7Fu;
  }
  const uint32_t sign = bits_of(quotient) >> 31 << 7;
  uint32_t bits = bits_of(quotient) & 0x7FFFFFFFu;
  if (bits > 0x43E00000u) bits = 0x43E00000u;  // 448
  if (bits >= 0x3C800000u) {                   // 2**-6
    return sign | (((bits + 0x7FFFFu + ((bits >> 20) & 1u)) >> 20) - (120u << 3));
  }
  return sign | rounded(float_of(bits) * 512.0f);
}

}  // namespace weights
