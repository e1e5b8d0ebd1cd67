// gathered_sum.cc: see gathered_sum.h.
#include "rows/gathered_sum.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace asyncfabric::rows {

GatheredSum::GatheredSum(const Runs& runs, size_t bytes)
    : kernels_(best_kernels()),
      runs_(runs),
      walk_(runs, kStepBytes),
      bytes_(bytes),
      left_(bytes / xxh3::kStripe - 1),
      last_(runs.data) {}

void GatheredSum::copy(uint8_t* to, size_t length, bool past) {
  const size_t stripes = std::min(length / xxh3::kStripe, left_);
  const size_t first = done_ / xxh3::kStripe % xxh3::kStripesOfBlock;
  if (const uint8_t* last = carry(walk_, kernels_.copy_stripes, lanes_.sums, first, stripes, to, length, past))
    last_ = last;
  done_ += length;
  left_ -= stripes;
}

bool GatheredSum::begin_parts(size_t length) {
  if (done_ % kBlockBytes != 0) return false;
  together_ = length;
  parts_.resize((length + kBlockBytes - 1) / kBlockBytes * 8);
  return true;
}

void GatheredSum::copy_part(uint8_t* to, size_t at, size_t length, bool past) {
  Walk walk(runs_, kStepBytes);
  walk.seek(done_ + at);
  const size_t stripes = std::min(length / xxh3::kStripe, left_ - at / xxh3::kStripe);
  uint64_t* sums = parts_.data() + at / kBlockBytes * 8;
  if (const uint8_t* last = carry(walk, kernels_.copy_parts, sums, 0, stripes, to, length, past)) last_ = last;
}

void GatheredSum::end_parts() {
  const size_t stripes = std::min(together_ / xxh3::kStripe, left_), blocks = stripes / xxh3::kStripesOfBlock;
  kernels_.chain(lanes_.sums, parts_.data(), blocks);
  if (stripes % xxh3::kStripesOfBlock != 0)
    for (size_t lane = 0; lane < 8; ++lane) lanes_.sums[lane] += parts_[8 * blocks + lane];
  done_ += together_;
  left_ -= stripes;
  walk_.seek(done_);
}

const uint8_t* GatheredSum::carry(Walk& walk, Add add, uint64_t* sums, size_t first, size_t stripes, uint8_t* to,
                                  size_t length, bool past) const {
  past = past && reinterpret_cast<uintptr_t>(to) % xxh3::kStripe == 0;
  const bool parts = add == kernels_.copy_parts;
  const uint8_t* last = nullptr;
  while (length != 0) {
    const uint8_t* from = walk.data();
    const size_t step = std::min(walk.length(), length);
    walk.next(step);
    // The processor sees what comes next within a run, but not where the next one begins: so that is asked for.
    const uint8_t* next = walk.length() >= step ? walk.data() : from;
    const size_t count = std::min(step / xxh3::kStripe, stripes);
    add(sums, from, count, first, to, next, past);
    stripes -= count;
    first += count;
    if (parts) sums += first / xxh3::kStripesOfBlock * 8;
    first %= xxh3::kStripesOfBlock;
    if (const size_t done = count * xxh3::kStripe; done != step) {
      last = from + done;
      std::memcpy(to + done, last, step - done);
    }
    to += step;
    length -= step;
  }
#if defined(__x86_64__)
  if (past) _mm_sfence();  // streaming stores are weakly ordered: another thread may read the target next
#endif
  return last;
}

}  // namespace asyncfabric::rows
