// striping.cc: see striping.h.
#include "engine/ops/striping.h"

#include <algorithm>

namespace asyncfabric {

size_t plan_stripes(uint64_t total, std::span<const double> weights, size_t first, uint64_t minimum, uint64_t align,
                    std::span<Stripe> out) {
  const size_t lanes = weights.size();
  if (total == 0 || lanes == 0) return 0;
  minimum = std::max<uint64_t>(minimum, 1);
  align = std::max<uint64_t>(align, 1);
  const size_t used = static_cast<size_t>(std::clamp<uint64_t>(total / minimum, 1, lanes));
  double weight_left = 0;
  for (size_t i = 0; i < used; ++i) weight_left += weights[(first + i) % lanes];

  size_t parts = 0;
  uint64_t begin = 0;
  for (size_t i = 0; i < used && begin < total; ++i) {
    const uint32_t lane = static_cast<uint32_t>((first + i) % lanes);
    const uint64_t left = total - begin;
    const size_t lanes_left = used - i;
    uint64_t length = left;
    if (lanes_left > 1) {
      // A share of what is left, not of the total: rounding errors do not pile up on the last lane.
      const double share = weight_left > 0 ? weights[lane] / weight_left : 1.0 / static_cast<double>(lanes_left);
      length = static_cast<uint64_t>(static_cast<double>(left) * share);
      length = length / align * align;
      const uint64_t keep = minimum * (lanes_left - 1);  // the lanes after this one get at least their minimum
      length = std::min(std::max(length, minimum), left > keep ? left - keep : left);
    }
    weight_left -= weights[lane];
    out[parts++] = {lane, begin, begin + length};
    begin += length;
  }
  return parts;
}

}  // namespace asyncfabric
