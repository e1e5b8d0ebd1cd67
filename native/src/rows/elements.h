// elements.h: a vector's elements of a row as fp32 and back, for the loops; included and compiled as loops.h is.
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

// A vector is what a register holds: compilers take longer ones to pieces by way of memory.
#if defined(__AVX512F__)
constexpr size_t kLanes = 16;
#elif defined(__AVX2__)
constexpr size_t kLanes = 8;
#else
constexpr size_t kLanes = 4;
#endif
using Floats = float __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));
using Halves8 = uint16_t __attribute__((vector_size(16)));

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
#if defined(__AVX512F__)  // by halves: gcc 12 warns about its own header otherwise
  using Floats8 = float __attribute__((vector_size(32)));
  // By way of registers: memory that was written in two parts is not read as one without a wait.
  static void widen(const Halves& in, Floats& out) {
    const Halves8 low = __builtin_shufflevector(in, in, 0, 1, 2, 3, 4, 5, 6, 7);
    const Halves8 high = __builtin_shufflevector(in, in, 8, 9, 10, 11, 12, 13, 14, 15);
    const auto first = reinterpret_cast<Floats8>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(low)));
    const auto second = reinterpret_cast<Floats8>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(high)));
    out = __builtin_shufflevector(first, second, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }
  static void narrow(const Floats& in, Halves& out) {
    const Floats8 low = __builtin_shufflevector(in, in, 0, 1, 2, 3, 4, 5, 6, 7);
    const Floats8 high = __builtin_shufflevector(in, in, 8, 9, 10, 11, 12, 13, 14, 15);
    const auto first =
        reinterpret_cast<Halves8>(_mm256_cvtps_ph(reinterpret_cast<__m256>(low), _MM_FROUND_TO_NEAREST_INT));
    const auto second =
        reinterpret_cast<Halves8>(_mm256_cvtps_ph(reinterpret_cast<__m256>(high), _MM_FROUND_TO_NEAREST_INT));
    out = __builtin_shufflevector(first, second, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }
#elif defined(__F16C__)
  static void widen(const Halves& in, Floats& out) {
    out = reinterpret_cast<Floats>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(in)));
  }
  static void narrow(const Floats& in, Halves& out) {
    out = reinterpret_cast<Halves>(_mm256_cvtps_ph(reinterpret_cast<__m256>(in), _MM_FROUND_TO_NEAREST_INT));
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
  static void widen(const Halves& in, Floats& out) {
    for (size_t lane = 0; lane < kLanes; ++lane) out[lane] = widened(in[lane]);
  }
  static void narrow(const Floats& in, Halves& out) {
    for (size_t lane = 0; lane < kLanes; ++lane) out[lane] = narrowed(in[lane]);
  }
#endif
  static void load(const uint8_t* from, Floats& out) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    widen(halves, out);
  }
  static void store(uint8_t* to, const Floats& in) {
    Halves halves;
    narrow(in, halves);
    std::memcpy(to, &halves, sizeof halves);
  }
};

}  // namespace
}  // namespace asyncfabric::rows
