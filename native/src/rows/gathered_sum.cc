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
      walk_(runs, kStepBytes),
      bytes_(bytes),
      left_(bytes / xxh3::kStripe - 1),
      last_(runs.data) {}

void GatheredSum::copy(uint8_t* to, size_t length, bool past) {
  past = past && reinterpret_cast<uintptr_t>(to) % xxh3::kStripe == 0;
  while (length != 0) {
    const uint8_t* from = walk_.data();
    const size_t step = std::min(walk_.length(), length);
    walk_.next(step);
    // The processor sees what comes next within a run, but not where the next one begins: so that is asked for.
    const uint8_t* next = walk_.length() >= step ? walk_.data() : from;
    const size_t stripes = std::min(step / xxh3::kStripe, left_);
    kernels_.copy_stripes(lanes_.sums, from, stripes, place_, to, next, past);
    left_ -= stripes;
    place_ = (place_ + stripes) % xxh3::kStripesOfBlock;
    if (const size_t done = stripes * xxh3::kStripe; done != step) {
      last_ = from + done;
      std::memcpy(to + done, last_, step - done);
    }
    to += step;
    length -= step;
  }
#if defined(__x86_64__)
  if (past) _mm_sfence();  // streaming stores are weakly ordered: another thread may read the target next
#endif
}

}  // namespace asyncfabric::rows
