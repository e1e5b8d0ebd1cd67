// row_parts.h: the rows of a loop as one part, or cut into several, of which one may be empty.
#pragma once

#include <span>
#include <vector>

#include "asyncfabric/rows.h"

namespace asyncfabric::rows {

inline std::vector<GoingRows> going_to(Target target, std::span<const int64_t> cuts = {}) {
  std::vector<GoingRows> parts;
  int64_t begin = 0;
  const auto add = [&](int64_t end) {
    const auto before = static_cast<size_t>(begin);
    parts.push_back({begin, end, {target.data + before * target.row_bytes, target.count - before, target.row_bytes}});
    begin = end;
  };
  for (const int64_t cut : cuts) add(cut);
  add(static_cast<int64_t>(target.count));
  return parts;
}

inline std::vector<ComingRows> coming_from(Source source, std::span<const int64_t> cuts = {}) {
  std::vector<ComingRows> parts;
  int64_t begin = 0;
  const auto add = [&](int64_t end) {
    const auto before = static_cast<size_t>(begin);
    const Source rows{source.data + before * source.row_bytes, source.count - before, source.row_bytes};
    parts.push_back({begin, end, rows, false, {}});
    begin = end;
  };
  for (const int64_t cut : cuts) add(cut);
  add(static_cast<int64_t>(source.count));
  return parts;
}

}  // namespace asyncfabric::rows
