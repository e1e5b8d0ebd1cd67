// loops.h: the loops behind kernels.h, included by one file for each instruction set and compiled with its flags.
// Everything is in an unnamed namespace and nothing of the standard library's templates is used: the linker must never
// take a function that was compiled for a newer machine in place of the plain one.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "rows/conversions.h"
#include "rows/elements.h"
#include "rows/kernels.h"
#include "rows/turning.h"
#include "rows/xxh3.h"

namespace asyncfabric::rows {
namespace {

// What is taken in one piece: kVectors vectors of sums behind kBytes bytes of a row.
template <RowKind kKind>
struct Single {
  static constexpr size_t kVectors = 1, kElements = kLanes, kBytes = kLanes * Element<kKind>::kBytes;
  static void load(const uint8_t* from, Floats* out) { Element<kKind>::load(from, *out); }
  static void store(uint8_t* to, const Floats* in) { Element<kKind>::store(to, *in); }
};

// 32 elements of bfloat16 as those of even and of odd places: no element has to change its lane to become an fp32.
struct Double {
  static constexpr size_t kVectors = 2, kElements = 2 * kLanes, kBytes = 2 * kElements;
  static void load(const uint8_t* from, Floats* out) {
    static_assert(std::endian::native == std::endian::little);
    Words words;
    std::memcpy(&words, from, sizeof words);
    const Words even = words << 16, odd = words & 0xffff0000;
    std::memcpy(out, &even, sizeof even);
    std::memcpy(out + 1, &odd, sizeof odd);
  }
  static void store(uint8_t* to, const Floats* in) {
    Words even, odd;
    round_to_bfloat(in[0], even);
    round_to_bfloat(in[1], odd);
    const Words words = even | odd << 16;
    std::memcpy(to, &words, sizeof words);
  }
};

template <RowKind kKind>
struct Widest : Single<kKind> {};
template <>
struct Widest<RowKind::kBfloat16> : Double {};

// kBlock pieces of sums stay in registers while the sources go by: each source is read once, the target written once.
template <class Piece, size_t kBlock>
[[gnu::always_inline]] inline void add_block(Floats (&sums)[kBlock * Piece::kVectors], const uint8_t* const* sources,
                                             const float* weights, size_t count, size_t offset) {
  for (size_t source = 0; source < count; ++source) {
    const uint8_t* from = sources[source] + offset;
    for (size_t piece = 0; piece < kBlock; ++piece) {
      Floats values[Piece::kVectors];
      Piece::load(from + piece * Piece::kBytes, values);
      for (size_t vector = 0; vector < Piece::kVectors; ++vector) {
        if (weights != nullptr) values[vector] *= weights[source];
        sums[piece * Piece::kVectors + vector] += values[vector];
      }
    }
  }
}

// Returns the column that it came to.
template <class Piece, size_t kBlock>
[[gnu::always_inline]] inline size_t sum_blocks(uint8_t* target, const uint8_t* const* sources, const float* weights,
                                                size_t count, size_t column, size_t width) {
  constexpr size_t kElementBytes = Piece::kBytes / Piece::kElements;
  for (; column + kBlock * Piece::kElements <= width; column += kBlock * Piece::kElements) {
    const size_t offset = column * kElementBytes;
    Floats sums[kBlock * Piece::kVectors] = {};
    add_block<Piece, kBlock>(sums, sources, weights, count, offset);
    for (size_t piece = 0; piece < kBlock; ++piece)
      Piece::store(target + offset + piece * Piece::kBytes, sums + piece * Piece::kVectors);
  }
  return column;
}

template <RowKind kKind>
void sum(uint8_t* target, const uint8_t* const* sources, const float* weights, size_t count, size_t width) {
  const size_t column = sum_blocks<Widest<kKind>, 4>(target, sources, weights, count, 0, width);
  sum_blocks<Single<kKind>, 1>(target, sources, weights, count, column, width);
}

template <RowKind kKind>
void carry(float* sums, const uint8_t* const* sources, size_t count, size_t width) {
  for (size_t column = 0; column < width; column += kLanes) {
    Floats block[1];
    std::memcpy(block, sums + column, sizeof block);
    add_block<Single<kKind>, 1>(block, sources, nullptr, count, column * Element<kKind>::kBytes);
    std::memcpy(sums + column, block, sizeof block);
  }
}

void stream(uint8_t* target, const uint8_t* source, size_t length) {
#if defined(__AVX512F__)
  for (size_t at = 0; at < length; at += 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + at), _mm512_loadu_si512(source + at));
#elif defined(__x86_64__)
  for (size_t at = 0; at < length; at += 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(target + at),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + at)));
#else
  std::memcpy(target, source, length);
#endif
}

// What a loop over stripes does with each besides adding it up.
struct OnlySum {
  void operator()(size_t, const void*) const {}
};
template <bool kPast>
struct AndCopy {
  uint8_t* target;
  const uint8_t* next;
  void operator()(size_t at, const void* stripe) const {
    __builtin_prefetch(next + at);
#if defined(__AVX512F__)
    if (kPast) return _mm512_stream_si512(reinterpret_cast<__m512i*>(target + at), _mm512_loadu_si512(stripe));
#elif defined(__AVX2__)
    if (kPast) {
      const auto* from = static_cast<const __m256i*>(stripe);
      auto* to = reinterpret_cast<__m256i*>(target + at);
      _mm256_stream_si256(to, _mm256_loadu_si256(from));
      return _mm256_stream_si256(to + 1, _mm256_loadu_si256(from + 1));
    }
#endif
    std::memcpy(target + at, stripe, xxh3::kStripe);
  }
};

#if defined(__AVX512F__)

using Longs = uint64_t __attribute__((vector_size(64)));

// By the form that leaves no lane open: gcc 12 warns about its own header otherwise.
[[gnu::always_inline]] inline void multiply_halves(const Longs& a, const Longs& b, Longs& out) {
  out =
      reinterpret_cast<Longs>(_mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}

template <class Also>
void each_stripe(uint64_t* sums, const uint8_t* data, size_t count, size_t first, Also also) {
  using namespace xxh3;
  Longs lanes, words, key, product;
  std::memcpy(&lanes, sums, sizeof lanes);
  for (size_t at = 0; at < count * kStripe; at += kStripe) {
    std::memcpy(&words, data + at, sizeof words);
    also(at, &words);
    std::memcpy(&key, kSecret + 8 * first, sizeof key);
    key ^= words;
    multiply_halves(key, key >> 32, product);
    lanes += product + __builtin_shuffle(words, Longs{1, 0, 3, 2, 5, 4, 7, 6});
    if (++first < kStripesOfBlock) continue;
    first = 0;
    std::memcpy(&key, kSecret + kScrambleAt, sizeof key);
    lanes ^= lanes >> 47;
    lanes ^= key;
    const Longs prime = Longs{} + kPrime32[0];
    multiply_halves(lanes >> 32, prime, key);
    multiply_halves(lanes, prime, product);
    lanes = product + (key << 32);
  }
  std::memcpy(sums, &lanes, sizeof lanes);
}

#elif defined(__AVX2__)

template <class Also>
void each_stripe(uint64_t* sums, const uint8_t* data, size_t count, size_t first, Also also) {
  using namespace xxh3;
  const auto load = [](const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); };
  const __m256i prime = _mm256_set1_epi64x(static_cast<int64_t>(kPrime32[0]));
  __m256i lanes[2] = {load(sums), load(sums + 4)};
  for (size_t at = 0; at < count * kStripe; at += kStripe) {
    also(at, data + at);
    for (size_t half = 0; half < 2; ++half) {
      const __m256i words = load(data + at + 32 * half);
      const __m256i keys = _mm256_xor_si256(words, load(kSecret + 8 * first + 32 * half));
      lanes[half] = _mm256_add_epi64(lanes[half], _mm256_shuffle_epi32(words, 0x4e));
      lanes[half] = _mm256_add_epi64(lanes[half], _mm256_mul_epu32(keys, _mm256_srli_epi64(keys, 32)));
    }
    if (++first < kStripesOfBlock) continue;
    first = 0;
    for (size_t half = 0; half < 2; ++half) {
      __m256i mixed = _mm256_xor_si256(lanes[half], _mm256_srli_epi64(lanes[half], 47));
      mixed = _mm256_xor_si256(mixed, load(kSecret + kScrambleAt + 32 * half));
      const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
      lanes[half] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
    }
  }
  for (size_t half = 0; half < 2; ++half) _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + 4 * half), lanes[half]);
}

#else

template <class Also>
void each_stripe(uint64_t* sums, const uint8_t* data, size_t count, size_t first, Also also) {
  using namespace xxh3;
  static_assert(std::endian::native == std::endian::little);
  for (size_t at = 0; at < count * kStripe; at += kStripe) {
    also(at, data + at);
    for (size_t lane = 0; lane < 8; ++lane) {
      const uint64_t word = word_at(data + at + 8 * lane), key = word ^ word_at(kSecret + 8 * (first + lane));
      sums[lane ^ 1] += word;
      sums[lane] += (key & 0xffffffff) * (key >> 32);
    }
    if (++first < kStripesOfBlock) continue;
    first = 0;
    for (size_t lane = 0; lane < 8; ++lane)
      sums[lane] = (sums[lane] ^ sums[lane] >> 47 ^ word_at(kSecret + kScrambleAt + 8 * lane)) * kPrime32[0];
  }
}

#endif

void stripes(uint64_t* sums, const uint8_t* data, size_t count, size_t first) {
  each_stripe(sums, data, count, first, OnlySum{});
}

void copy_stripes(uint64_t* sums, const uint8_t* data, size_t count, size_t first, uint8_t* target, const uint8_t* next,
                  bool past) {
  if (past)
    each_stripe(sums, data, count, first, AndCopy<true>{target, next});
  else
    each_stripe(sums, data, count, first, AndCopy<false>{target, next});
}

constexpr Kernels kernels_named(const char* name) {
  return {name,
          {sum<RowKind::kBfloat16>, sum<RowKind::kFloat16>, sum<RowKind::kFloat32>},
          {carry<RowKind::kBfloat16>, carry<RowKind::kFloat16>, carry<RowKind::kFloat32>},
          stream,
          stripes,
          copy_stripes,
          {{nullptr, cast<RowKind::kBfloat16, RowKind::kFloat16>, cast<RowKind::kBfloat16, RowKind::kFloat32>},
           {cast<RowKind::kFloat16, RowKind::kBfloat16>, nullptr, cast<RowKind::kFloat16, RowKind::kFloat32>},
           {cast<RowKind::kFloat32, RowKind::kBfloat16>, cast<RowKind::kFloat32, RowKind::kFloat16>, nullptr}},
          {quantise<RowKind::kBfloat16>, quantise<RowKind::kFloat16>, quantise<RowKind::kFloat32>},
          {largest<RowKind::kBfloat16>, largest<RowKind::kFloat16>, largest<RowKind::kFloat32>},
          {turn<Bytes16>, turn<Halves8>, turn<Words4>}};
}

}  // namespace
}  // namespace asyncfabric::rows
