// whole.cuh: boxes of whole quantisation blocks, read once: the largest number of a block, its scale, its float8.
// A block of 256 threads takes one quantisation block in three steps, between which all of it waits: `look` loads it and returns
// the largest, `write` converts what was loaded, `turn` writes columns as rows where that is wanted.
#pragma once

#include "elements.cuh"

namespace weights {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kPitch = kBlock + 16;  // bytes from row to row of a block that is turned round

// A box. One that is quantised begins at a block, and ends at one or where the parameter ends.
struct Whole {
  uint64_t source;
  uint64_t lead_stride;  // elements
  uint64_t row_stride;
  uint64_t out;
  uint64_t
      out_strides[3];  // bytes: from lead to lead, row to row, column to column; one of the last two is of an element
  uint64_t scales;
  uint64_t scale_strides[3];  // numbers; of what is quantised
  uint32_t rows;
  uint32_t columns;
  uint32_t block_rows;  // tiles: quantisation blocks, or smaller ones
  uint32_t block_columns;
  uint32_t first;  // of its tiles in the launch
  uint32_t spare;
};

// As many as fit the parameters of a launch.
struct Wholes {
  Whole each[32];
};

// What one thread holds of a block: 16 bytes of each of some rows.
template <typename Form>
struct Held {
  static constexpr uint32_t kEach = 16 / sizeof(typename Form::Bits);
  static constexpr uint32_t kAcross = kBlock / kEach;
  static constexpr uint32_t kDown = kThreads / kAcross;
  static constexpr uint32_t kLoads = kBlock / kDown;
  uint4 loaded[kLoads];
};

// Four bytes out of eight: which, lowest first, in four bits each.
AF_DEVICE uint32_t picked(uint32_t low, uint32_t high, uint32_t which) {
#if defined(__CUDACC__)
  return __byte_perm(low, high, which);
#else
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  uint32_t found = 0;
  for (int byte = 0; byte < 4; ++byte) found |= (both >> (which >> (4 * byte) & 7) * 8 & 0xFFu) << (8 * byte);
  return found;
#endif
}

struct Spot {
  uint32_t lead;
  uint32_t block_row;
  uint32_t block_column;
};

// Which box has a tile.
AF_DEVICE uint32_t box_of(const Wholes& boxes, uint32_t count, uint32_t tile) {
  uint32_t low = 0;
  while (count > 1) {
    const uint32_t half = count / 2;
    if (boxes.each[low + half].first <= tile) low += half;
    count -= half;
  }
  return low;
}

AF_DEVICE Spot spot_of(const Whole& box, uint32_t tile) {
  tile -= box.first;
  const uint32_t row = tile / box.block_columns;
  return {row / box.block_rows, row % box.block_rows, tile % box.block_columns};
}

template <typename Form>
AF_DEVICE uint32_t look(const Whole& box, const Spot& spot, uint32_t thread, Held<Form>& held) {
  using Bits = typename Form::Bits;
  const uint32_t row = spot.block_row * kBlock + thread / Held<Form>::kAcross;
  const uint32_t column = spot.block_column * kBlock + thread % Held<Form>::kAcross * Held<Form>::kEach;
  const Bits* source = reinterpret_cast<const Bits*>(box.source) + spot.lead * box.lead_stride + column;
#pragma unroll
  for (uint32_t index = 0; index < Held<Form>::kLoads; ++index) {
    const uint32_t here = row + index * Held<Form>::kDown;
    held.loaded[index] = uint4{0, 0, 0, 0};
    if (here < box.rows && column < box.columns) {
      held.loaded[index] = *reinterpret_cast<const uint4*>(source + here * box.row_stride);
    }
  }
  uint32_t high = 0;  // of the upper halves; of two neighbours the lower one does not change which is larger
  uint32_t low = 0;
#pragma unroll
  for (uint32_t index = 0; index < Held<Form>::kLoads; ++index) {
    const uint32_t words[4] = {held.loaded[index].x, held.loaded[index].y, held.loaded[index].z, held.loaded[index].w};
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      if (sizeof(Bits) == 2) {
        const uint32_t size = words[part] & 0x7FFF7FFFu;
        high = high > size ? high : size;
        low = low > size << 16 ? low : size << 16;
      } else {
        const uint32_t size = words[part] & 0x7FFFFFFFu;
        high = high > size ? high : size;
      }
    }
  }
  if (sizeof(Bits) == 4) return high;
  return (high > low ? high : low) >> 16;
}

// As asyncfabric/weights/arithmetic.py has it: NaN keeps its bits, but becomes quiet.
AF_DEVICE float scale_of(float most) {
  if (is_nan(most)) return float_of(bits_of(most) | 0x00400000u);
  const float scale = divided(most, 448.0f);
  return scale < kSmallestScale ? kSmallestScale : scale;
}

// Float8 of four or eight numbers without signs, by the reciprocal of their scale. The quotient is corrected twice by what is
// left of the number, so it is the one that a division gives (P. Markstein, IA-64 and Elementary Functions, 2000, theorem 8.3):
// nearest to even, as long as nothing that is left vanishes, and the scale's digits are not all ones.
template <uint32_t kEach>
AF_DEVICE void codes_of(const float* numbers, float scale, float reciprocal, uint32_t* codes) {
  uint32_t shifted[kEach];
#pragma unroll
  for (uint32_t number = 0; number < kEach; ++number) {
    float quotient = numbers[number] * reciprocal;
    quotient = fmaf(fmaf(-quotient, scale, numbers[number]), reciprocal, quotient);
    quotient = fmaf(fmaf(-quotient, scale, numbers[number]), reciprocal, quotient);
    const uint32_t bits = bits_of(quotient);
    const uint32_t normal = (bits + 0x7FFFFu + (bits >> 20 & 1u)) - (120u << 23);
    const uint32_t tiny = bits_of(quotient + 16384.0f) << 20;  // steps of 2**-9, as float8 has them below 2**-6
    shifted[number] = (bits >= 0x3C800000u ? normal : tiny) << 4;
  }
#pragma unroll
  for (uint32_t word = 0; word < kEach / 4; ++word) {
    const uint32_t* four = shifted + 4 * word;
    codes[word] = picked(picked(four[0], four[1], 0x0073), picked(four[2], four[3], 0x0073), 0x5410);
  }
}

// Whether `codes_of` is right for a block.
AF_DEVICE bool tame(float largest, float scale) {
  return bits_of(largest) < 0x7F800000u && scale >= 0x1p-80f && scale <= 0x1p80f && (~bits_of(scale) & 0x7FFFFFu) != 0;
}

template <typename Form>
AF_DEVICE void write(const Whole& box, const Spot& spot, uint32_t thread, const Held<Form>& held, uint32_t most,
                     uint8_t* turned) {
  using Bits = typename Form::Bits;
  constexpr uint32_t kEach = Held<Form>::kEach;
  const float largest = Form::value(most);
  const float scale = scale_of(largest);
  const bool easy = tame(largest, scale);
  const float reciprocal = divided(1.0f, scale);
  if (thread == 0) {
    reinterpret_cast<float*>(box.scales)[spot.lead * box.scale_strides[0] + spot.block_row * box.scale_strides[1] +
                                         spot.block_column * box.scale_strides[2]] = scale;
  }
  const uint32_t row = thread / Held<Form>::kAcross;
  const uint32_t column = thread % Held<Form>::kAcross * kEach;
  const uint32_t top = spot.block_row * kBlock;
  const uint32_t left = spot.block_column * kBlock;
  if (left + column >= box.columns) return;
  const uint64_t pitch = turned != nullptr ? kPitch : box.out_strides[1];
  uint8_t* to = turned != nullptr ? turned + column
                                  : reinterpret_cast<uint8_t*>(box.out) + spot.lead * box.out_strides[0] + top * pitch +
                                        left + column;
  if (!easy) {  // seldom, so short rather than fast: what is always done fits the cache of instructions
    const Bits* source = reinterpret_cast<const Bits*>(box.source) + spot.lead * box.lead_stride + left + column;
#pragma unroll 1
    for (uint32_t down = row; down < kBlock && top + down < box.rows; down += Held<Form>::kDown) {
#pragma unroll 1
      for (uint32_t number = 0; number < kEach; ++number) {
        const uint32_t bits = source[(top + down) * box.row_stride + number];
        to[down * pitch + number] = static_cast<uint8_t>(quantised(Form::value(bits), scale));
      }
    }
    return;
  }
#pragma unroll
  for (uint32_t index = 0; index < Held<Form>::kLoads; ++index) {
    const uint32_t down = row + index * Held<Form>::kDown;
    if (top + down >= box.rows) break;
    const uint32_t words[4] = {held.loaded[index].x, held.loaded[index].y, held.loaded[index].z, held.loaded[index].w};
    float numbers[8] = {};
#pragma unroll
    for (uint32_t number = 0; number < kEach; ++number) {
      numbers[number] = Form::size(kEach == 4 ? words[number] : words[number / 2] >> (number % 2 * 16) & 0xFFFFu);
    }
    uint32_t codes[2];
    codes_of<kEach>(numbers, scale, reciprocal, codes);
    uint8_t* place = to + down * pitch;
    if constexpr (kEach == 8) {
      codes[0] |= picked(words[0], words[1], 0x7531) & 0x80808080u;
      codes[1] |= picked(words[2], words[3], 0x7531) & 0x80808080u;
      *reinterpret_cast<uint2*>(place) = make_uint2(codes[0], codes[1]);
    } else {
      const uint32_t low = picked(words[0], words[1], 0x0073);
      codes[0] |= picked(low, picked(words[2], words[3], 0x0073), 0x5410) & 0x80808080u;
      *reinterpret_cast<uint32_t*>(place) = codes[0];
    }
  }
}

// Lanes read neighbours of a row, and each writes 16 bytes of a column.
AF_DEVICE void turn(const Whole& box, const Spot& spot, uint32_t thread, const uint8_t* turned) {
  const uint32_t down = thread / 32 * 16;
  if (spot.block_row * kBlock + down >= box.rows) return;
  uint8_t* out = reinterpret_cast<uint8_t*>(box.out) + spot.lead * box.out_strides[0] + spot.block_row * kBlock + down;
  for (uint32_t column = thread % 32; column < kBlock; column += 32) {
    if (spot.block_column * kBlock + column >= box.columns) return;
    uint32_t words[4];
#pragma unroll
    for (uint32_t byte = 0; byte < 16; ++byte) {
      const uint32_t code = turned[(down + byte) * kPitch + column];
      words[byte / 4] = byte % 4 == 0 ? code : words[byte / 4] | code << (byte % 4 * 8);
    }
    *reinterpret_cast<uint4*>(out + (spot.block_column * kBlock + column) * box.out_strides[2]) =
        uint4{words[0], words[1], words[2], words[3]};
  }
}

}  // namespace weights
