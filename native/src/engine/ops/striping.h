// striping.h: divides a range over lanes. Pure functions, property-tested: parts cover every unit once, in order, none is empty.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace asyncfabric {

constexpr size_t kMaxLanes = 64;

struct Stripe {
  uint32_t lane = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
};

// Divides [0, total) over at most weights.size() lanes in proportion to their weights (speed of the rail; all equal when unknown).
//   first     lane that gets the first part; the others follow in order and wrap around, so that small totals rotate
//   minimum   no part is smaller, unless total itself is; fewer lanes are used instead
//   align     parts end at multiples of it, except the last
// Returns the number of parts written to `out` (room for weights.size()); 0 only for total 0.
size_t plan_stripes(uint64_t total, std::span<const double> weights, size_t first, uint64_t minimum, uint64_t align,
                    std::span<Stripe> out);

}  // namespace asyncfabric
