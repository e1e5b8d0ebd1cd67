// sharing.h: loops over rows, on the helper threads of the process where there are any and the loop is long enough. Any thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "base/work_pool.h"

namespace asyncfabric::rows {

constexpr size_t kWorthBytes = size_t{256} << 10;  // a loop over less is done by the caller alone
constexpr size_t kShareBytes = size_t{64} << 10;

// False: there are no helpers, or another loop has them. Nothing was done then.
bool run_with_helpers(SharedWork& work, size_t shares);

// Calls each(first, end) for pieces of [0, rows), which together are all of it, once. Pieces may be done at the same time.
template <class Each>
void share_rows(size_t rows, size_t row_bytes, const Each& each) {
  struct Shares final : SharedWork {
    Shares(const Each& call, size_t total, size_t size) : each(call), rows(total), length(size) {}
    void carry_out(size_t share) override { each(share * length, std::min(rows, (share + 1) * length)); }
    const Each& each;
    const size_t rows, length;
  };
  if (rows * row_bytes >= kWorthBytes) {
    Shares shares(each, rows, std::max({size_t{1}, kShareBytes / row_bytes, rows / WorkPool::kMostShares + 1}));
    if (run_with_helpers(shares, (rows + shares.length - 1) / shares.length)) return;
  }
  each(0, rows);
}

size_t length_of(const auto& part) { return static_cast<size_t>(part.end - part.begin); }

// The same for the rows of several parts, in one loop: calls each(part, first, end), counted from the part's first row.
template <class Part, class Each>
void share_parts(std::span<const Part> parts, size_t row_bytes, const Each& each) {
  size_t rows = 0;
  for (const Part& part : parts) rows += length_of(part);
  share_rows(rows, row_bytes, [&](size_t first, size_t end) {
    size_t before = 0;
    for (const Part& part : parts) {
      const size_t behind = before + length_of(part);
      if (first < behind && before < end) each(part, std::max(first, before) - before, std::min(end, behind) - before);
      before = behind;
    }
  });
}

}  // namespace asyncfabric::rows
