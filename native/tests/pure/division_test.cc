// division_test.cc: the division of the kernels' cast to fp8, on the CPU: all bfloat16 by all mantissas that a scale can have.
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __fmul_rn(one, other) ((one) * (other))
#define __fmaf_rn std::fma
#include "../../cuda/moe/division.cuh"
#undef __device__
#undef __fmul_rn
#undef __fmaf_rn

namespace {

constexpr float kLargest = 448.0f, kLeastPeak = 1e-4f;

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float bfloat16(uint32_t bits) { return from_bits(bits << 16); }

float scale_of(float peak) { return moe::divided(std::fmax(peak, kLeastPeak), kLargest, 1.0f / kLargest); }

TEST(Division, ScalesOfAllPeaksAreThoseOfADivision) {
  for (uint32_t bits = 0; bits <= 0x7f80; ++bits) {
    const float peak = bfloat16(bits);
    ASSERT_EQ(bits_of(scale_of(peak)), bits_of(std::fmax(peak, kLeastPeak) / kLargest)) << peak;
  }
}

// Whatever the hardware's reciprocal is. Numbers that fp8 rounds to zero, whose residues underflow, may differ; their signs do not.
void divide_all(float peak, int units) {
  constexpr float kToZero = 0x1p-11f;
  const float scale = scale_of(peak);
  const float reciprocal = scale <= FLT_MAX ? from_bits(bits_of(1.0f / scale) + static_cast<uint32_t>(units)) : 0.0f;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = bfloat16(bits);
    if (!(std::fabs(value) <= peak)) continue;
    const float found = moe::divided(value, scale, reciprocal), right = value / scale;
    if (std::fabs(found) < kToZero && std::fabs(right) < kToZero) {
      ASSERT_EQ(std::signbit(found), std::signbit(right)) << value << " / " << scale;
    } else if (std::isnan(right)) {
      ASSERT_TRUE(std::isnan(found)) << value << " / " << scale;
    } else {
      ASSERT_EQ(bits_of(found), bits_of(right)) << value << " / " << scale;
    }
  }
}

TEST(Division, QuotientsAreThoseOfADivision) {
  for (int units = -2; units <= 2; ++units) {
    for (uint32_t mantissa = 0; mantissa < 128; ++mantissa) divide_all(bfloat16(0x3f80 + mantissa), units);
    for (const uint32_t bits : {0x0000u, 0x0001u, 0x0080u, 0x38d1u, 0x38d2u, 0x7f00u, 0x7f7fu, 0x7f80u})
      divide_all(bfloat16(bits), units);
  }
}

}  // namespace
