// converting.h: matrices of weights cast, quantised to float8 in blocks, and measured for it, for asyncfabric.weights. Pure functions
// over memory, any thread, no GIL needed. The bits are those of asyncfabric/weights/arithmetic.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "asyncfabric/rows.h"

namespace asyncfabric::rows {

constexpr size_t kQuantisedBlock = 128;  // rows and columns that share a scale

// Part of a matrix: the elements of a row are next to each other, rows are `stride` bytes apart.
struct Plane {
  const uint8_t* data = nullptr;
  size_t rows = 0;
  size_t row_bytes = 0;
  ptrdiff_t stride = 0;
  RowKind kind = RowKind::kBfloat16;
};

// Where it goes; `turned`: rows here are the columns of the plane.
struct PlaneTarget {
  uint8_t* data = nullptr;
  size_t rows = 0;
  size_t row_bytes = 0;
  ptrdiff_t stride = 0;
  bool turned = false;
};

// False, and nothing was written: sizes do not fit each other, or the kinds are the same.
bool cast_plane(const Plane& plane, RowKind to, const PlaneTarget& target);

// Divides each element by the scale of its block. `row` and `column`: where the plane begins in its first block; `scales`: of exactly the
// blocks that it touches, row by row. False as above.
bool quantise_plane(const Plane& plane, size_t row, size_t column, std::span<const float> scales,
                    const PlaneTarget& target);

// The largest absolute value of each block that the plane touches, row by row; no number where a block has one that is none. False as above.
bool measure_plane(const Plane& plane, size_t row, size_t column, std::span<float> maxima);

}  // namespace asyncfabric::rows
