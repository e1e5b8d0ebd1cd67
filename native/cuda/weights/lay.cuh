// lay.cuh: boxes put in order and cast, read once: each element goes where it lies at the receiver.
// A block of 256 threads takes tiles of 64 x 64 in two steps: `bring` loads and casts, `turn_tile` writes columns as rows where that is
// wanted.
#pragma once

#include "elements.cuh"
#include "whole.cuh"

namespace weights {

constexpr uint32_t kSide = 64;
constexpr uint32_t kEach = 4;  // neighbours that a thread loads at once
constexpr uint32_t kTilePitch = kSide + 1;

// Elements that are moved as they are.
struct Bits16 {
  using Bits = uint16_t;
};
struct Bits32 {
  using Bits = uint32_t;
};

AF_DEVICE uint32_t stored(Bfloat16, float value) {
  const uint32_t bits = bits_of(value);
  return is_nan(value) ? 0x7FC0u : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}

AF_DEVICE uint32_t stored(Float16, float value) {
  const uint32_t sign = bits_of(value) >> 16 & 0x8000u;
  const uint32_t bits = bits_of(value) & 0x7FFFFFFFu;
  if (bits > 0x7F800000u) return sign | 0x7E00u | (bits >> 13 & 0x3FFu);
  if (bits >= 0x477FF000u) return sign | 0x7C00u;
  if (bits >= 0x38800000u) return sign | (bits + 0xFFFu + (bits >> 13 & 1u) - (112u << 23)) >> 13;
  return sign | rounded(float_of(bits) * 16777216.0f);
}

AF_DEVICE uint32_t stored(Float32, float value) { return bits_of(value); }

template <typename From, typename To>
struct Cast {
  static AF_DEVICE uint32_t of(uint32_t bits) { return stored(To{}, From::value(bits)); }
};
template <>
struct Cast<Bits16, Bits16> {
  static AF_DEVICE uint32_t of(uint32_t bits) { return bits; }
};
template <>
struct Cast<Bits32, Bits32> {
  static AF_DEVICE uint32_t of(uint32_t bits) { return bits; }
};

template <typename Bits>
AF_DEVICE void load_four(const Bits* from, uint32_t* four) {
  if constexpr (sizeof(Bits) == 2) {
    const uint2 words = *reinterpret_cast<const uint2*>(from);
    four[0] = words.x & 0xFFFFu;
    four[1] = words.x >> 16;
    four[2] = words.y & 0xFFFFu;
    four[3] = words.y >> 16;
  } else {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    four[0] = words.x;
    four[1] = words.y;
    four[2] = words.z;
    four[3] = words.w;
  }
}

template <typename Bits>
AF_DEVICE void store_four(Bits* to, const uint32_t* four) {
  if constexpr (sizeof(Bits) == 2) {
    *reinterpret_cast<uint2*>(to) = make_uint2(four[0] | four[1] << 16, four[2] | four[3] << 16);
  } else {
    *reinterpret_cast<uint4*>(to) = uint4{four[0], four[1], four[2], four[3]};
  }
}

template <typename From, typename To>
AF_DEVICE void bring(const Whole& box, const Spot& spot, uint32_t thread, typename To::Bits* turned) {
  constexpr uint32_t kAcross = kSide / kEach;
  constexpr uint32_t kDown = kThreads / kAcross;
  const uint32_t column = spot.block_column * kSide + thread % kAcross * kEach;
  const uint32_t row = spot.block_row * kSide + thread / kAcross;
  if (column >= box.columns) return;
  const auto* source = reinterpret_cast<const typename From::Bits*>(box.source) + spot.lead * box.lead_stride + column;
  auto* out = reinterpret_cast<typename To::Bits*>(box.out + spot.lead * box.out_strides[0]) + column;
  uint32_t four[kSide / kDown][kEach];
#pragma unroll
  for (uint32_t index = 0; index < kSide / kDown; ++index) {
    const uint32_t here = row + index * kDown;
    if (here < box.rows) load_four(source + here * box.row_stride, four[index]);
  }
#pragma unroll
  for (uint32_t index = 0; index < kSide / kDown; ++index) {
    const uint32_t here = row + index * kDown;
    if (here >= box.rows) return;
#pragma unroll
    for (uint32_t number = 0; number < kEach; ++number) four[index][number] = Cast<From, To>::of(four[index][number]);
    if (turned == nullptr) {
      store_four(out + here * (box.out_strides[1] / sizeof(*out)), four[index]);
      continue;
    }
    auto* place = turned + (here - spot.block_row * kSide) * kTilePitch + thread % kAcross * kEach;
#pragma unroll
    for (uint32_t number = 0; number < kEach; ++number)
      place[number] = static_cast<typename To::Bits>(four[index][number]);
  }
}

// Lanes read neighbours of a row, and write four of a column.
template <typename Bits>
AF_DEVICE void turn_tile(const Whole& box, const Spot& spot, uint32_t thread, const Bits* turned) {
  constexpr uint32_t kAcross = kSide / kEach;
  const uint32_t row = thread % kAcross * kEach;
  if (spot.block_row * kSide + row >= box.rows) return;
  Bits* out = reinterpret_cast<Bits*>(box.out + spot.lead * box.out_strides[0]) + spot.block_row * kSide + row;
  for (uint32_t column = thread / kAcross; column < kSide; column += kThreads / kAcross) {
    const uint32_t there = spot.block_column * kSide + column;
    if (there >= box.columns) return;
    uint32_t four[kEach];
#pragma unroll
    for (uint32_t number = 0; number < kEach; ++number) four[number] = turned[(row + number) * kTilePitch + column];
    store_four(out + there * (box.out_strides[2] / sizeof(Bits)), four);
  }
}

}  // namespace weights
