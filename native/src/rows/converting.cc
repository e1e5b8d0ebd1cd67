// converting.cc: what converting.h promises, on top of the loops: blocks in their order, and turning planes round.
#include "asyncfabric/converting.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "rows/kernels.h"

namespace asyncfabric::rows {
namespace {

constexpr size_t kLanes = 16, kTile = kQuantisedBlock;
constexpr size_t kWidest = sizeof(float);
constexpr size_t kApart =
    64;  // of rows of a tile: were they a power of two apart, few would have room in the nearest cache
constexpr size_t kAhead = 16;  // rows are asked for before they are converted
constexpr size_t kPast =
    size_t{8} << 20;  // a target that a core's share of the caches would not keep is written past them

size_t bytes_of(RowKind kind) { return kind == RowKind::kFloat32 ? 4 : 2; }

bool known(RowKind kind) { return kind <= RowKind::kFloat32; }

size_t columns_of(const Plane& plane) { return plane.row_bytes / bytes_of(plane.kind); }

bool fits(const Plane& plane, const PlaneTarget& target, size_t item) {
  const size_t columns = columns_of(plane);
  if (plane.row_bytes % bytes_of(plane.kind) != 0) return false;
  return target.turned ? target.rows == columns && target.row_bytes == plane.rows * item
                       : target.rows == plane.rows && target.row_bytes == columns * item;
}

// Sides of a plane are cut where blocks of the matrix end; `at` is where it begins in the first of them.
struct Cuts {
  size_t at, length;
  size_t count() const { return length == 0 ? 0 : (at + length + kTile - 1) / kTile; }
  size_t low(size_t number) const { return number == 0 ? 0 : number * kTile - at; }
  size_t high(size_t number) const { return std::min(length, (number + 1) * kTile - at); }
};

// Rows of a tile are short and far apart: a processor does not foresee them.
void ask_for(const uint8_t* data, size_t length) {
  const uint8_t* const line = data - reinterpret_cast<uintptr_t>(data) % 64;
  for (size_t at = 0; line + at < data + length; at += 64) __builtin_prefetch(line + at);
}

// Calls `convert(to, from, block row, block column, width)` for each row of each tile.
template <class Convert>
void each_tile(const Plane& plane, const Cuts& down, const Cuts& across, const PlaneTarget& target, size_t item,
               Convert convert) {
  const size_t from_item = bytes_of(plane.kind);
  alignas(64) std::array<uint8_t, kTile*(kTile * kWidest + kApart)> tile;
  const size_t pitch = kTile * item + kApart;
  const auto turn = best_kernels().turn[item / 2];
  const bool past = target.rows * target.row_bytes >= kPast;
  for (size_t block_row = 0; block_row < down.count(); ++block_row) {
    const size_t low = down.low(block_row), high = down.high(block_row);
    const auto row_of = [&](size_t row) { return plane.data + static_cast<ptrdiff_t>(row) * plane.stride; };
    if (!target.turned) {
      for (size_t row = low; row < high; ++row)
        for (size_t block = 0; block < across.count(); ++block) {
          const size_t left = across.low(block);
          uint8_t* const to = target.data + static_cast<ptrdiff_t>(row) * target.stride + left * item;
          convert(to, row_of(row) + left * from_item, block_row, block, across.high(block) - left);
        }
      continue;
    }
    for (size_t block = 0; block < across.count(); ++block) {
      const size_t left = across.low(block), width = across.high(block) - left;
      for (size_t row = low; row < high; ++row) {
        const size_t ahead = row + kAhead;
        if (ahead < high)
          ask_for(row_of(ahead) + left * from_item, width * from_item);
        else if (block + 1 < across.count())
          ask_for(row_of(low + (ahead - high) % (high - low)) + across.low(block + 1) * from_item,
                  (across.high(block + 1) - across.low(block + 1)) * from_item);
        convert(tile.data() + (row - low) * pitch, row_of(row) + left * from_item, block_row, block, width);
      }
      uint8_t* const to = target.data + static_cast<ptrdiff_t>(left) * target.stride + low * item;
      turn(to, target.stride, tile.data(), pitch, high - low, width, past);
    }
  }
}

}  // namespace

bool cast_plane(const Plane& plane, RowKind to, const PlaneTarget& target) {
  if (!known(plane.kind) || !known(to)) return false;
  const Kernels::Convert convert = best_kernels().cast[static_cast<size_t>(plane.kind)][static_cast<size_t>(to)];
  const size_t item = bytes_of(to);
  if (convert == nullptr || !fits(plane, target, item)) return false;
  const Cuts down{0, plane.rows}, across{0, columns_of(plane)};
  each_tile(
      plane, down, across, target, item,
      [convert](uint8_t* into, const uint8_t* from, size_t, size_t, size_t width) { convert(into, from, width); });
  return true;
}

bool quantise_plane(const Plane& plane, size_t row, size_t column, std::span<const float> scales,
                    const PlaneTarget& target) {
  if (!known(plane.kind) || !fits(plane, target, 1) || row >= kTile || column >= kTile) return false;
  const Cuts down{row, plane.rows}, across{column, columns_of(plane)};
  if (scales.size() != down.count() * across.count()) return false;
  const auto quantise = best_kernels().quantise[static_cast<size_t>(plane.kind)];
  each_tile(plane, down, across, target, 1,
            [&](uint8_t* into, const uint8_t* from, size_t block_row, size_t block, size_t width) {
              quantise(into, from, scales[block_row * across.count() + block], width);
            });
  return true;
}

bool measure_plane(const Plane& plane, size_t row, size_t column, std::span<float> maxima) {
  if (!known(plane.kind) || plane.row_bytes % bytes_of(plane.kind) != 0 || row >= kTile || column >= kTile)
    return false;
  const Cuts down{row, plane.rows}, across{column, columns_of(plane)};
  const size_t blocks = across.count(), item = bytes_of(plane.kind);
  if (maxima.size() != down.count() * blocks) return false;
  const auto largest = best_kernels().largest[static_cast<size_t>(plane.kind)];
  std::vector<uint32_t> most(blocks * kLanes);
  for (size_t block_row = 0; block_row < down.count(); ++block_row) {
    std::fill(most.begin(), most.end(), 0);
    for (size_t at = down.low(block_row); at < down.high(block_row); ++at)
      for (size_t block = 0; block < blocks; ++block) {
        const size_t left = across.low(block);
        const uint8_t* const from = plane.data + static_cast<ptrdiff_t>(at) * plane.stride + left * item;
        largest(&most[block * kLanes], from, across.high(block) - left);
      }
    for (size_t block = 0; block < blocks; ++block) {
      const uint32_t* const lanes = &most[block * kLanes];
      const uint32_t found = *std::max_element(lanes, lanes + kLanes);
      std::memcpy(&maxima[block_row * blocks + block], &found, sizeof found);
    }
  }
  return true;
}

}  // namespace asyncfabric::rows
