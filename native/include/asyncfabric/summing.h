// summing.h: checksums for asyncfabric.weights. The XXH3 of many boxes of a memory, each of which is some stretches one after the other:
// a table of all boxes is made once, and some of them are summed each time. And the sum of words that GPUs work out too.
// Pure functions over memory, any thread, no GIL needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "asyncfabric/ordering.h"

namespace asyncfabric::rows {

struct BoxTable {
  std::span<const int64_t> stretches;      // by box: where its stretches begin; and behind the last box, where they end
  std::span<const int64_t> at, run_bytes;  // by stretch
  std::span<const int64_t> dimensions;     // by stretch, as `stretches`: of `sizes` and `strides`
  std::span<const int64_t> sizes, strides;  // from run to run, outermost first; strides in bytes

  // How many bytes a memory must have so that every box lies in it. False: columns do not fit each other, or a box has fewer than
  // kLeastSummedBytes.
  bool measure(size_t* memory_bytes) const;
};

// Works out in `sums` the XXH3 with 64 bits, seed 0, of each box in `numbers`. The memory has as many
// bytes as the table measures. False, and nothing was read: a number is none of the table's, or there are not as many sums.
bool sum_boxes(const uint8_t* memory, const BoxTable& table, std::span<const int64_t> numbers,
               std::span<uint64_t> sums);

// The sum behind the checksum `words` of asyncfabric.weights, over words of 32 bits of which the first is at `place`; the last one is
// filled up by zeros. Sums of parts add up to that of the whole.
uint64_t sum_words(std::span<const uint8_t> bytes, uint32_t place);

}  // namespace asyncfabric::rows
