// pairs.cc: rows grouped by expert, as a counting sort: count the pairs, then give each its place.
#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "asyncfabric/rows.h"

namespace asyncfabric::rows {
namespace {

// The expert's place among those looked for; too large a number for any other expert and for -1.
size_t place_of(int32_t expert, int32_t first) { return static_cast<size_t>(int64_t{expert} - first); }

// The choices whose experts are looked for. Which ones these are is chance: they are listed without a branch for each.
class Wanted {
 public:
  Wanted(std::span<const int32_t> experts, int32_t first, size_t places)
      : listed_(std::make_unique_for_overwrite<size_t[]>(experts.size() + 1)) {
    for (size_t at = 0; at < experts.size(); ++at) {
      listed_[count_] = at;
      count_ += place_of(experts[at], first) < places;
    }
  }
  std::span<const size_t> choices() const { return {listed_.get(), count_}; }

 private:
  std::unique_ptr<size_t[]> listed_;
  size_t count_ = 0;
};

}  // namespace

int64_t count_pairs(std::span<const int32_t> experts, size_t choices, int32_t first, int64_t alignment,
                    std::span<int64_t> counts, std::span<int64_t> begins, std::span<int64_t> pair_offsets) {
  if (choices == 0 || alignment < 1 || begins.size() != counts.size() + 1 || pair_offsets.empty() ||
      experts.size() != (pair_offsets.size() - 1) * choices)
    return -1;
  const Wanted wanted(experts, first, counts.size());
  std::fill(counts.begin(), counts.end(), 0);
  std::fill(pair_offsets.begin(), pair_offsets.end(), 0);
  for (const size_t at : wanted.choices()) {
    ++counts[place_of(experts[at], first)];
    ++pair_offsets[at / choices + 1];
  }
  std::partial_sum(pair_offsets.begin(), pair_offsets.end(), pair_offsets.begin());
  begins.front() = 0;
  for (size_t place = 0; place < counts.size(); ++place)
    begins[place + 1] = begins[place] + (counts[place] + alignment - 1) / alignment * alignment;
  return pair_offsets.back();
}

bool place_pairs(std::span<const int32_t> experts, std::span<const float> weights, size_t choices, int32_t first,
                 std::span<const int64_t> begins, const Pairs& pairs) {
  if (choices == 0 || begins.empty() || weights.size() != experts.size() ||
      pairs.weights.size() != pairs.position.size() || pairs.row_of.size() != pairs.choice_of.size())
    return false;
  std::vector<int64_t> next(begins.begin(), begins.end() - 1);
  std::fill(pairs.row_of.begin(), pairs.row_of.end(), -1);
  std::fill(pairs.choice_of.begin(), pairs.choice_of.end(), -1);
  const Wanted wanted(experts, first, next.size());
  size_t pair = 0;
  for (const size_t at : wanted.choices()) {
    const size_t place = place_of(experts[at], first);
    const int64_t position = next[place];
    if (pair >= pairs.position.size() || position < 0 || static_cast<uint64_t>(position) >= pairs.row_of.size())
      return false;
    ++next[place];
    pairs.position[pair] = position;
    pairs.weights[pair] = weights[at];
    pairs.row_of[static_cast<size_t>(position)] = static_cast<int64_t>(at / choices);
    pairs.choice_of[static_cast<size_t>(position)] = static_cast<int64_t>(at % choices);
    ++pair;
  }
  return pair == pairs.position.size();
}

}  // namespace asyncfabric::rows
