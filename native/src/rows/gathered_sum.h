// gathered_sum.h: a box copied in order, in as many parts as the caller likes, and the XXH3 of it, in one pass over memory.
#pragma once

#include "rows/kernels.h"
#include "rows/walk.h"
#include "rows/xxh3.h"

namespace asyncfabric::rows {

class GatheredSum {
 public:
  // `runs` has `bytes`, is of whole stripes, has at least kLeastSummedBytes, and outlives this.
  GatheredSum(const Runs& runs, size_t bytes);

  // The next `length` bytes, whole stripes. `past`: past the caches, where `to` lies at the beginning of a line.
  void copy(uint8_t* to, size_t length, bool past);
  uint64_t sum() { return lanes_.finish(last_, bytes_); }  // when all are copied; once

 private:
  static constexpr size_t kStepBytes = 4096;  // the next run is asked for while so much is copied

  const Kernels& kernels_;
  Walk walk_;
  xxh3::Lanes lanes_;
  const size_t bytes_;
  size_t left_;       // stripes that are still to be summed; the last of all is not among them
  size_t place_ = 0;  // of the next stripe in its block
  const uint8_t* last_;
};

}  // namespace asyncfabric::rows
