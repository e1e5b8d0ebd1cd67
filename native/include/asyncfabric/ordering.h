// ordering.h: runs that lie apart in memory put in order, and the XXH3 of them, in one pass, for asyncfabric.weights. A pure function
// over memory, any thread, no GIL needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace asyncfabric::rows {

// Runs of equal length: `sizes` of the dimensions that go from run to run, outermost first, and bytes from one step to the next.
struct Runs {
  const uint8_t* data = nullptr;
  std::span<const int64_t> sizes, strides;
  size_t run_bytes = 0;

  // Of all runs, and from the first byte to the end of what they touch. False: sizes do not fit each other or are too large.
  bool measure(size_t* bytes, size_t* reach) const;
};

constexpr size_t kLeastSummedBytes = 241;  // shorter inputs have formulas of their own

// Copies the runs behind each other into `target`, which has exactly their bytes, and returns in `sum` what XXH3 with 64 bits, seed 0,
// makes of them. `past`: past the caches, for a target that is read much later. False, and nothing was written: they do not fit, or are
// fewer than kLeastSummedBytes.
bool order_and_sum(const Runs& runs, std::span<uint8_t> target, bool past, uint64_t* sum);

}  // namespace asyncfabric::rows
