// pairs.cc: rows grouped by expert, as a counting sort: count the pairs, then give each its place.
#include <algorithm>

#include "asyncfabric/rows.h"

namespace asyncfabric::rows {
namespace {

// The expert's place among those looked for; too large a number for any other expert and for -1.
size_t place_of(int32_t expert, int32_t first) { return static_cast<size_t>(int64_t{expert} - first); }

}  // namespace

int64_t count_pairs(std::span<const int32_t> experts, size_t choices, int32_t first, std::span<int64_t> counts,
                    std::span<int64_t> pair_offsets) {
  std::fill(counts.begin(), counts.end(), 0);
  int64_t pairs = 0;
  for (size_t row = 0; row + 1 < pair_offsets.size(); ++row) {
    pair_offsets[row] = pairs;
    for (const int32_t expert : experts.subspan(row * choices, choices)) {
      const size_t place = place_of(expert, first);
      if (place >= counts.size()) continue;
      ++counts[place];
      ++pairs;
    }
  }
  pair_offsets.back() = pairs;
  return pairs;
}

bool place_pairs(std::span<const int32_t> experts, size_t choices, int32_t first, std::span<int64_t> begins,
                 const Pairs& pairs) {
  size_t pair = 0;
  for (size_t at = 0; at < experts.size(); ++at) {
    const size_t place = place_of(experts[at], first);
    if (place >= begins.size()) continue;
    const int64_t position = begins[place]++;
    if (pair >= pairs.position.size() || position < 0 || static_cast<uint64_t>(position) >= pairs.row_of.size())
      return false;
    const auto row = static_cast<int64_t>(at / choices), choice = static_cast<int64_t>(at % choices);
    pairs.position[pair] = position;
    pairs.row[pair] = row;
    pairs.choice[pair] = choice;
    pairs.row_of[static_cast<size_t>(position)] = row;
    pairs.choice_of[static_cast<size_t>(position)] = choice;
    ++pair;
  }
  return pair == pairs.position.size();
}

}  // namespace asyncfabric::rows
