// conversions.h: the loops that cast elements, quantise them, and look for the largest; included and compiled as loops.h is.
// The bits are those of asyncfabric/weights/arithmetic.py.
#pragma once

#include "rows/elements.h"

namespace asyncfabric::rows {
namespace {

using Codes = uint8_t __attribute__((vector_size(kLanes)));

constexpr uint32_t kSize = 0x7fffffff, kInfinite = 0x7f800000;
constexpr uint32_t kLargest = 0x43e00000, kLeastNormal = 0x3c800000;  // 448 and 2**-6, of float8_e4m3fn
constexpr uint32_t kBiasApart = (127 - 7) << 3;                       // of the exponents, in codes
constexpr float kStepsOfOne = 512.0F, kWhole = 0x1p23F;               // below 2**-6 codes are steps of 2**-9

// The lowest byte of each word.
#if defined(__AVX2__) && !defined(__AVX512F__)
[[gnu::always_inline]] inline void lowest_bytes(const Words& in, Codes& out) {
  using Bytes = uint8_t __attribute__((vector_size(4 * kLanes)));
  const auto bytes = reinterpret_cast<Bytes>(in);
  out = __builtin_shufflevector(bytes, bytes, 0, 4, 8, 12, 16, 20, 24, 28);
}
#else
[[gnu::always_inline]] inline void lowest_bytes(const Words& in, Codes& out) {
  out = __builtin_convertvector(in, Codes);
}
#endif

// Whole vectors of a row, and then what is left, by way of one that is filled up with zeros.
template <size_t kFrom, size_t kTo, class Each>
[[gnu::always_inline]] inline void each_vector(uint8_t* target, const uint8_t* source, size_t width, Each each) {
  size_t column = 0;
  for (; column + kLanes <= width; column += kLanes) each(target + column * kTo, source + column * kFrom);
  if (column == width) return;
  uint8_t from[kLanes * kFrom] = {}, to[kLanes * kTo + 1];  // there are no arrays of nothing
  std::memcpy(from, source + column * kFrom, (width - column) * kFrom);
  each(to, from);
  if (kTo != 0) std::memcpy(target + column * kTo, to, (width - column) * kTo);
}

// As Element, but fp16 that is no number has the bits that numpy gives it: of the others' as many as there is room for. Processors
// set one of them.
template <RowKind kKind>
struct Exact : Element<kKind> {};
template <>
struct Exact<RowKind::kFloat16> {
  using Usual = Element<RowKind::kFloat16>;
  static constexpr size_t kBytes = Usual::kBytes;
  static void load(const uint8_t* from, Floats& out) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    Usual::widen(halves, out);
    const Words words = __builtin_convertvector(halves, Words);
    Words bits;
    std::memcpy(&bits, &out, sizeof bits);
    const Words none = (words & 0x8000) << 16 | kInfinite | (words & 0x3ff) << 13;
    bits = (words & 0x7fff) > 0x7c00 ? none : bits;
    std::memcpy(&out, &bits, sizeof out);
  }
  static void store(uint8_t* to, const Floats& in) {
    Words bits;
    std::memcpy(&bits, &in, sizeof bits);
    Halves halves;
    Usual::narrow(in, halves);
    const Words payload = bits >> 13 & 0x3ff;
    const Words none = (bits >> 16 & 0x8000) | 0x7c00 | (payload == 0 ? Words{} + 1 : payload);
    const Words words = (bits & kSize) > kInfinite ? none : __builtin_convertvector(halves, Words);
    halves = __builtin_convertvector(words, Halves);
    std::memcpy(to, &halves, sizeof halves);
  }
};

template <RowKind kFrom, RowKind kTo>
void cast(uint8_t* target, const uint8_t* source, size_t width) {
  each_vector<Exact<kFrom>::kBytes, Exact<kTo>::kBytes>(target, source, width, [](uint8_t* to, const uint8_t* from) {
    Floats values;
    Exact<kFrom>::load(from, values);
    Exact<kTo>::store(to, values);
  });
}

template <RowKind kFrom>
void quantise(uint8_t* target, const uint8_t* source, float scale, size_t width) {
  each_vector<Element<kFrom>::kBytes, 1>(target, source, width, [scale](uint8_t* to, const uint8_t* from) {
    Floats values;
    Element<kFrom>::load(from, values);
    values /= scale;
    Words bits;
    std::memcpy(&bits, &values, sizeof bits);
    Words size = bits & kSize;
    const Words numbers = size > kInfinite ? Words{} : ~Words{};
    size = size > kLargest ? Words{} + kLargest : size;
    Floats steps;
    std::memcpy(&steps, &size, sizeof steps);
    steps = steps * kStepsOfOne + kWhole;  // the product is exact, the sum rounds to whole steps
    Words tiny;
    std::memcpy(&tiny, &steps, sizeof tiny);
    const Words normal = ((size + 0x7ffff + ((size >> 20) & 1)) >> 20) - kBiasApart;
    Words code = size < kLeastNormal ? tiny & 0xff : normal;
    code = (code & numbers) | (0x7f & ~numbers) | (bits >> 24 & 0x80);
    Codes codes;
    lowest_bytes(code, codes);
    std::memcpy(to, &codes, sizeof codes);
  });
}

template <RowKind kFrom>
void largest(uint32_t* most, const uint8_t* source, size_t width) {
  Words found;
  std::memcpy(&found, most, sizeof found);
  each_vector<Element<kFrom>::kBytes, 0>(nullptr, source, width, [&found](uint8_t*, const uint8_t* from) {
    Floats values;
    Element<kFrom>::load(from, values);
    Words bits;
    std::memcpy(&bits, &values, sizeof bits);
    bits &= kSize;
    found = bits > found ? bits : found;
  });
  std::memcpy(most, &found, sizeof found);
}

}  // namespace
}  // namespace asyncfabric::rows
