// gathered_sum.h: a box copied in order, in as many steps as the caller likes, and the XXH3 of it, in one pass over memory.
// A step may be done by several threads.
#pragma once

#include <vector>

#include "rows/kernels.h"
#include "rows/walk.h"
#include "rows/xxh3.h"

namespace asyncfabric::rows {

class GatheredSum {
 public:
  // `runs` has `bytes`, is of whole stripes, has at least kLeastSummedBytes, and outlives this.
  GatheredSum(const Runs& runs, size_t bytes);

  static constexpr size_t kBlockBytes = xxh3::kStripe * xxh3::kStripesOfBlock;

  // The next `length` bytes, whole stripes. `past`: past the caches, where `to` lies at the beginning of a line.
  void copy(uint8_t* to, size_t length, bool past);
  uint64_t sum() { return lanes_.finish(last_, bytes_); }  // when all are copied; once

  // The same in parts that begin at whole blocks of the box: each once, on any thread, between begin and end, which are called where
  // the others are. False: a block has begun.
  bool begin_parts(size_t length);
  void copy_part(uint8_t* to, size_t at, size_t length, bool past);
  void end_parts();

 private:
  static constexpr size_t kStepBytes = 4096;  // the next run is asked for while so much is copied

  using Add = void (*)(uint64_t* sums, const uint8_t* data, size_t count, size_t first, uint8_t* target,
                       const uint8_t* next, bool past);
  // Copies from where `walk` is, and adds up `stripes` of that; returns where the stripe behind them lies, null: there is none.
  const uint8_t* carry(Walk& walk, Add add, uint64_t* sums, size_t first, size_t stripes, uint8_t* to, size_t length,
                       bool past) const;

  const Kernels& kernels_;
  const Runs& runs_;
  Walk walk_;
  xxh3::Lanes lanes_;
  const size_t bytes_;
  size_t done_ = 0;  // bytes
  size_t left_;      // stripes that are still to be summed; the last of all is not among them
  const uint8_t* last_;

  size_t together_ = 0;          // bytes that are copied in parts now
  std::vector<uint64_t> parts_;  // the sums of each block of them
};

}  // namespace asyncfabric::rows
