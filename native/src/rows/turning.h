// turning.h: a tile whose columns become rows, square after square in registers; included and compiled as loops.h is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "rows/elements.h"

namespace asyncfabric::rows {
namespace {

using Bytes16 = uint8_t __attribute__((vector_size(16)));
using Words4 = uint32_t __attribute__((vector_size(16)));

constexpr size_t kTurned = 512;  // bytes of a row of a strip

[[gnu::always_inline]] inline void mingle(Bytes16& one, Bytes16& other) {
  const Bytes16 low = __builtin_shufflevector(one, other, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  other = __builtin_shufflevector(one, other, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  one = low;
}

[[gnu::always_inline]] inline void mingle(Halves8& one, Halves8& other) {
  const Halves8 low = __builtin_shufflevector(one, other, 0, 8, 1, 9, 2, 10, 3, 11);
  other = __builtin_shufflevector(one, other, 4, 12, 5, 13, 6, 14, 7, 15);
  one = low;
}

[[gnu::always_inline]] inline void mingle(Words4& one, Words4& other) {
  const Words4 low = __builtin_shufflevector(one, other, 0, 4, 1, 5);
  other = __builtin_shufflevector(one, other, 2, 6, 3, 7);
  one = low;
}

// One square: rows of as many elements as there are of them, `pitch` bytes apart, become columns. Each round mingles a row with the one
// half the square below it; after as many rounds as the side has bits an element is where its row and column are exchanged.
template <class Vector>
[[gnu::always_inline]] inline void turn_square(uint8_t* target, size_t stride, const uint8_t* from, size_t pitch) {
  constexpr size_t kSide = sizeof(Vector) / sizeof(Vector{}[0]);
  Vector rows[kSide], mixed[kSide];
  for (size_t row = 0; row < kSide; ++row) std::memcpy(&rows[row], from + row * pitch, sizeof rows[row]);
  for (size_t round = kSide; round > 1; round /= 2) {
    for (size_t row = 0; row < kSide / 2; ++row) {
      mixed[2 * row] = rows[row];
      mixed[2 * row + 1] = rows[row + kSide / 2];
      mingle(mixed[2 * row], mixed[2 * row + 1]);
    }
    for (size_t row = 0; row < kSide; ++row) rows[row] = mixed[row];  // in registers
  }
  for (size_t row = 0; row < kSide; ++row) std::memcpy(target + row * stride, &rows[row], sizeof rows[row]);
}

// Full lines of a row past the caches, the rest by way of them.
inline void put(uint8_t* target, const uint8_t* source, size_t length, bool past) {
#if defined(__x86_64__)
  if (past && reinterpret_cast<uintptr_t>(target) % 64 == 0) {
    const size_t whole = length / 64 * 64;
    for (size_t at = 0; at < whole; at += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + at),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + at)));
    target += whole, source += whole, length -= whole;
  }
#else
  static_cast<void>(past);
#endif
  std::memcpy(target, source, length);
}

// As many columns as a square has, all rows of the tile, are a strip, which stays in the nearest cache until it is put where it belongs: rows
// of the target may be a power of two apart, and then few of their lines have room there.
template <class Vector>
void turn(uint8_t* target, ptrdiff_t stride, const uint8_t* tile, size_t pitch, size_t rows, size_t columns,
          bool past) {
  constexpr size_t kItem = sizeof(Vector{}[0]), kSide = sizeof(Vector) / kItem;
  alignas(64) uint8_t strip[kSide * kTurned];
  for (size_t column = 0; column < columns; column += kSide) {
    for (size_t row = 0; row < rows; row += kSide)
      turn_square<Vector>(strip + row * kItem, kTurned, tile + row * pitch + column * kItem, pitch);
    const size_t width = columns - column < kSide ? columns - column : kSide;
    for (size_t each = 0; each < width; ++each, target += stride)
      put(target, strip + each * kTurned, rows * kItem, past);
  }
#if defined(__x86_64__)
  if (past) _mm_sfence();
#endif
}

}  // namespace
}  // namespace asyncfabric::rows
