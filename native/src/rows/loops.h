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
#include "rows/stripes.h"
#include "rows/turning.h"
#include "rows/words.h"

namespace asyncfabric::rows {
namespace {

// What is taken in one piece: kVectors vectors of sums behind kBytes bytes of a row.
template <RowKind kKind>
struct Single {
  static constexpr size_t kVectors = 1, kElements = kLanes, kBytes = kLanes * Element<kKind>::kBytes;
  static void load(const uint8_t* from, Floats* out) { Element<kKind>::load(from, *out); }
  static void store(uint8_t* to, const Floats* in) { Element<kKind>::store(to, *in); }
};

// Elements of bfloat16 as those of even and of odd places: no element has to change its lane to become an fp32.
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

// So much of each source is asked for ahead: rows lie apart, and processors see little of what comes next in several.
constexpr size_t kAheadBytes = 1024;

// kBlock pieces of sums stay in registers while the sources go by: each source is read once, the target written once.
template <class Piece, size_t kBlock>
[[gnu::always_inline]] inline void add_block(Floats (&sums)[kBlock * Piece::kVectors], const uint8_t* const* sources,
                                             const float* weights, size_t count, size_t offset) {
  for (size_t source = 0; source < count; ++source) {
    const uint8_t* from = sources[source] + offset;
    for (size_t line = 0; line < kBlock * Piece::kBytes; line += 64) __builtin_prefetch(from + kAheadBytes + line);
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

constexpr Kernels kernels_named(const char* name) {
  return {name,
          {sum<RowKind::kBfloat16>, sum<RowKind::kFloat16>, sum<RowKind::kFloat32>},
          {carry<RowKind::kBfloat16>, carry<RowKind::kFloat16>, carry<RowKind::kFloat32>},
          stream,
          stripes,
          copy_stripes<false>,
          copy_stripes<true>,
          chain,
          sum_words,
          {{nullptr, cast<RowKind::kBfloat16, RowKind::kFloat16>, cast<RowKind::kBfloat16, RowKind::kFloat32>},
           {cast<RowKind::kFloat16, RowKind::kBfloat16>, nullptr, cast<RowKind::kFloat16, RowKind::kFloat32>},
           {cast<RowKind::kFloat32, RowKind::kBfloat16>, cast<RowKind::kFloat32, RowKind::kFloat16>, nullptr}},
          {quantise<RowKind::kBfloat16>, quantise<RowKind::kFloat16>, quantise<RowKind::kFloat32>},
          {largest<RowKind::kBfloat16>, largest<RowKind::kFloat16>, largest<RowKind::kFloat32>},
          {turn<Bytes16>, turn<Halves8>, turn<Words4>}};
}

}  // namespace
}  // namespace asyncfabric::rows
