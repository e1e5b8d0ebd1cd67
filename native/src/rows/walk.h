// walk.h: the runs of a box one after the other, as they lie in memory, in steps of some bytes at most.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "asyncfabric/ordering.h"

namespace asyncfabric::rows {

constexpr size_t kMostDimensions = 8;

class Walk {
 public:
  Walk(const Runs& runs, size_t most)
      : runs_(runs), run_(runs.data), most_(most), length_(std::min(runs.run_bytes, most)) {}

  const uint8_t* data() const { return run_ + within_; }
  size_t length() const { return length_; }

  // Goes on from so many bytes behind the first.
  void seek(size_t at) {
    run_ = runs_.data;
    within_ = at % runs_.run_bytes;
    size_t run = at / runs_.run_bytes;
    for (size_t dimension = runs_.sizes.size(); dimension-- > 0;) {
      const auto size = static_cast<size_t>(runs_.sizes[dimension]);
      index_[dimension] = static_cast<int64_t>(run % size);
      run_ += runs_.strides[dimension] * index_[dimension];
      run /= size;
    }
    length_ = std::min(runs_.run_bytes - within_, most_);
  }

  void next() { next(length_); }
  void next(size_t taken) {  // behind the last run: the first again, which may be looked at too
    within_ += taken;
    if (within_ == runs_.run_bytes) {
      within_ = 0;
      for (size_t dimension = runs_.sizes.size(); dimension-- > 0;) {
        run_ += runs_.strides[dimension];
        if (++index_[dimension] < runs_.sizes[dimension]) break;
        run_ -= runs_.strides[dimension] * runs_.sizes[dimension];
        index_[dimension] = 0;
      }
    }
    length_ = std::min(runs_.run_bytes - within_, most_);
  }

 private:
  const Runs& runs_;
  const uint8_t* run_;
  const size_t most_;
  size_t within_ = 0, length_;
  int64_t index_[kMostDimensions] = {};
};

}  // namespace asyncfabric::rows
