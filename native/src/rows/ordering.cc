// ordering.cc: what ordering.h promises: a little is copied, then summed while it lies in the nearest cache, then the next is copied.
#include "asyncfabric/ordering.h"

#include <algorithm>
#include <cstring>

#include "rows/gathered_sum.h"
#include "rows/kernels.h"
#include "rows/walk.h"
#include "rows/xxh3.h"

namespace asyncfabric::rows {
namespace {

constexpr size_t kStepBytes = 4096;  // copied before it is summed
constexpr size_t kLineBytes = 64;

}  // namespace

bool Runs::measure(size_t* bytes, size_t* reach) const {
  constexpr size_t kMost = size_t{1} << 56;
  if (sizes.size() != strides.size() || sizes.size() > kMostDimensions || run_bytes == 0 || run_bytes > kMost)
    return false;
  *bytes = *reach = run_bytes;
  for (size_t dimension = 0; dimension < sizes.size(); ++dimension) {
    if (sizes[dimension] <= 0 || strides[dimension] < 0) return false;
    const auto steps = static_cast<size_t>(sizes[dimension] - 1), stride = static_cast<size_t>(strides[dimension]);
    if (steps >= kMost / *bytes || (stride != 0 && steps > (kMost - *reach) / stride)) return false;
    *bytes *= steps + 1;
    *reach += steps * stride;
  }
  return true;
}

bool order_and_sum(const Runs& runs, std::span<uint8_t> target, bool past, uint64_t* sum) {
  size_t bytes = 0, reach = 0;
  if (!runs.measure(&bytes, &reach) || bytes != target.size() || bytes < kLeastSummedBytes) return false;
  if (runs.run_bytes % xxh3::kStripe == 0) {
    GatheredSum whole(runs, bytes);
    whole.copy(target.data(), bytes, past);
    *sum = whole.sum();
    return true;
  }
  const Kernels& kernels = best_kernels();
  const size_t stripes = (bytes - 1) / xxh3::kStripe;  // the last one is not among them
  xxh3::Lanes lanes;
  Walk walk(runs, kStepBytes);
  size_t summed = 0;
  for (size_t copied = 0; copied < bytes;) {
    const uint8_t* from = walk.data();
    const size_t length = walk.length();
    walk.next();
    // The processor sees what comes next within a run, but not where the next one begins: so that is asked for.
    for (size_t at = 0; at < walk.length(); at += kLineBytes) __builtin_prefetch(walk.data() + at);
    std::memcpy(target.data() + copied, from, length);
    copied += length;
    const size_t ready = std::min(copied / xxh3::kStripe, stripes);
    const uint8_t* data = target.data() + summed * xxh3::kStripe;
    kernels.stripes(lanes.sums, data, ready - summed, summed % xxh3::kStripesOfBlock, data);
    summed = ready;
  }
  *sum = lanes.finish(target.data() + bytes - xxh3::kStripe, bytes);
  return true;
}

}  // namespace asyncfabric::rows
