// words.h: the loop over words of 32 bits behind `sum_words`, a part of loops.h, whose rules it keeps.
// Source of the constants: asyncfabric/weights/memory/checksums.py; kernels of GPUs have the same.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace asyncfabric::rows {
namespace {

constexpr uint32_t kFirstFactor = 0x9e3779b1, kSecondFactor = 0x85ebca77, kWordOffset = 0x6a09e667;

#if defined(__AVX512F__)
constexpr size_t kWideBytes = 64;
#elif defined(__AVX2__)
constexpr size_t kWideBytes = 32;
#else
constexpr size_t kWideBytes = 16;
#endif
constexpr size_t kWideWords = kWideBytes / 4, kWideLongs = kWideBytes / 8;
using WideWords = uint32_t __attribute__((vector_size(kWideBytes)));
using WideLongs = uint64_t __attribute__((vector_size(kWideBytes)));

// The products of the lower halves.
[[gnu::always_inline]] inline void multiply_lower(const WideLongs& a, const WideLongs& b, WideLongs& out) {
#if defined(__AVX512F__)  // by the form that leaves no lane open: gcc 12 warns about its own header otherwise
  out = reinterpret_cast<WideLongs>(
      _mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  out = reinterpret_cast<WideLongs>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__x86_64__)
  out = reinterpret_cast<WideLongs>(_mm_mul_epu32(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  out = (a & 0xffffffff) * (b & 0xffffffff);
#endif
}

template <class Value>
[[gnu::always_inline]] inline void mix(Value& value) {
  value *= kFirstFactor;
  value ^= value >> 15;
}

template <class Value>
[[gnu::always_inline]] inline void mix_place(Value& value) {
  mix(value);
  value *= kSecondFactor;
  value ^= value >> 16;
}

uint64_t sum_words(const uint8_t* words, size_t count, uint32_t place) {
  static_assert(std::endian::native == std::endian::little);
  WideWords places;
  for (size_t lane = 0; lane < kWideWords; ++lane) places[lane] = place + kWordOffset + static_cast<uint32_t>(lane);
  WideLongs products = {}, alone = {};
  size_t at = 0;
  for (; at + kWideWords <= count; at += kWideWords) {
    WideWords mixed, factors = places;
    std::memcpy(&mixed, words + 4 * at, sizeof mixed);
    mixed += kWordOffset;
    mix(mixed);
    mix_place(factors);
    places += static_cast<uint32_t>(kWideWords);
    const auto left = reinterpret_cast<WideLongs>(factors), right = reinterpret_cast<WideLongs>(mixed);
    WideLongs even, odd;
    multiply_lower(left, right, even);
    multiply_lower(left >> 32, right >> 32, odd);
    products += even + odd;
    alone += (right & 0xffffffff) + (right >> 32);
  }
  uint64_t total = 0;
  for (size_t lane = 0; lane < kWideLongs; ++lane) total += 2 * products[lane] + alone[lane];
  for (; at < count; ++at) {
    uint32_t mixed, factor = place + kWordOffset + static_cast<uint32_t>(at);
    std::memcpy(&mixed, words + 4 * at, sizeof mixed);
    mixed += kWordOffset;
    mix(mixed);
    mix_place(factor);
    total += (2 * static_cast<uint64_t>(factor) + 1) * mixed;
  }
  return total;
}

}  // namespace
}  // namespace asyncfabric::rows
