// elements.h: sixteen elements of a row as fp32 and back, for the loops; included and compiled as loops.h is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "asyncfabric/rows.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace asyncfabric::rows {
namespace {

constexpr size_t kLanes = 16;
using Floats = float __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
using Halves = uint16_t __attribute__((vector_size(32)));

// To nearest, even; in the lower halves. Vectors go by reference: no function may depend on how they are returned.
[[gnu::always_inline]] inline void round_to_bfloat(const Floats& in, Words& out) {
  Words words;
  std::memcpy(&words, &in, sizeof words);
  const Words rounded = (words + 0x7fff + ((words >> 16) & 1)) >> 16;
  out = (words & 0x7fffffff) > 0x7f800000 ? Words{} + 0x7fc0 : rounded;
}

template <RowKind kKind>
struct Element;

template <>
struct Element<RowKind::kFloat32> {
  static constexpr size_t kBytes = 4;
  static void load(const uint8_t* from, Floats& out) { std::memcpy(&out, from, sizeof out); }
  static void store(uint8_t* to, const Floats& in) { std::memcpy(to, &in, sizeof in); }
};

template <>
struct Element<RowKind::kBfloat16> {
  static constexpr size_t kBytes = 2;
  static void load(const uint8_t* from, Floats& out) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    const Words words = __builtin_convertvector(halves, Words) << 16;
    std::memcpy(&out, &words, sizeof out);
  }
  static void store(uint8_t* to, const Floats& in) {
    Words rounded;
    round_to_bfloat(in, rounded);
    const Halves halves = __builtin_convertvector(rounded, Halves);
    std::memcpy(to, &halves, sizeof halves);
  }
};

template <>
struct Element<RowKind::kFloat16> {
  static constexpr size_t kBytes = 2;
#if defined(__F16C__)  // also with AVX-512: gcc 12 warns about its own header there
  static void load(const uint8_t* from, Floats& out) {
    for (size_t half = 0; half < 2; ++half) {
      const __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + half * 16)));
      std::memcpy(reinterpret_cast<uint8_t*>(&out) + half * 32, &wide, sizeof wide);
    }
  }
  static void store(uint8_t* to, const Floats& in) {
    for (size_t half = 0; half < 2; ++half) {
      __m256 wide;
      std::memcpy(&wide, reinterpret_cast<const uint8_t*>(&in) + half * 32, sizeof wide);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + half * 16), _mm256_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT));
    }
  }
#else
  static float widened(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    uint32_t word = static_cast<uint32_t>(half & 0x7fff) << 13;
    if ((half & 0x7c00) == 0x7c00) {
      word |= 0x7f800000;  // infinite, or no number
    } else {
      float scaled;
      std::memcpy(&scaled, &word, sizeof scaled);
      scaled *= 0x1p112F;  // exact, also for those below the normal range
      std::memcpy(&word, &scaled, sizeof word);
    }
    word |= sign;
    float wide;
    std::memcpy(&wide, &word, sizeof wide);
    return wide;
  }
  static uint16_t narrowed(float wide) {
    uint32_t word;
    std::memcpy(&word, &wide, sizeof word);
    const auto sign = static_cast<uint16_t>((word >> 16) & 0x8000);
    word &= 0x7fffffff;
    if (word > 0x7f800000) return sign | 0x7e00;
    if (word >= 0x47800000) return sign | 0x7c00;
    if (word < 0x38800000) {  // below the normal range: the addition rounds at the last bit that is left
      float small;
      std::memcpy(&small, &word, sizeof small);
      small += 0.5F;
      std::memcpy(&word, &small, sizeof word);
      return static_cast<uint16_t>(sign | (word - 0x3f000000));
    }
    return static_cast<uint16_t>(sign | ((word - 0x38000000 + 0xfff + ((word >> 13) & 1)) >> 13));
  }
  static void load(const uint8_t* from, Floats& out) {
    uint16_t halves[kLanes];
    std::memcpy(halves, from, sizeof halves);
    for (size_t lane = 0; lane < kLanes; ++lane) out[lane] = widened(halves[lane]);
  }
  static void store(uint8_t* to, const Floats& in) {
    uint16_t halves[kLanes];
    for (size_t lane = 0; lane < kLanes; ++lane) halves[lane] = narrowed(in[lane]);
    std::memcpy(to, halves, sizeof halves);
  }
#endif
};

}  // namespace
}  // namespace asyncfabric::rows
