// matching.cc: the Hungarian method with potentials and shortest augmenting paths, rows times rows times columns steps
// (H. W. Kuhn, 1955; J. Munkres, 1957). A greedy choice is shorter but can strand the last GPU with the farthest NIC.
#include "topology/matching.h"

#include <algorithm>
#include <limits>

namespace asyncfabric::topology {

// Row 0 and column 0 are the virtual start; owner[c] is the row that holds column c, 0 for a free one.
std::vector<uint32_t> cheapest_columns(const std::vector<std::vector<int64_t>>& costs) {
  const size_t rows = costs.size();
  if (rows == 0) return {};
  const size_t columns = costs.front().size();
  constexpr int64_t kInfinite = std::numeric_limits<int64_t>::max() / 4;
  std::vector<int64_t> row_potential(rows + 1, 0);
  std::vector<int64_t> column_potential(columns + 1, 0);
  std::vector<size_t> owner(columns + 1, 0);
  std::vector<size_t> came_from(columns + 1, 0);
  for (size_t row = 1; row <= rows; ++row) {
    std::vector<int64_t> slack(columns + 1, kInfinite);
    std::vector<bool> reached(columns + 1, false);
    owner[0] = row;
    size_t at = 0;
    do {
      reached[at] = true;
      const size_t holder = owner[at];
      int64_t step = kInfinite;
      size_t next = 0;
      for (size_t column = 1; column <= columns; ++column) {
        if (reached[column]) continue;
        const int64_t reduced = costs[holder - 1][column - 1] - row_potential[holder] - column_potential[column];
        if (reduced < slack[column]) {
          slack[column] = reduced;
          came_from[column] = at;
        }
        if (slack[column] < step) {
          step = slack[column];
          next = column;
        }
      }
      for (size_t column = 0; column <= columns; ++column) {
        if (reached[column]) {
          row_potential[owner[column]] += step;
          column_potential[column] -= step;
        } else {
          slack[column] -= step;
        }
      }
      at = next;
    } while (owner[at] != 0);
    while (at != 0) {
      const size_t before = came_from[at];
      owner[at] = owner[before];
      at = before;
    }
  }
  std::vector<uint32_t> chosen(rows, 0);
  for (size_t column = 1; column <= columns; ++column)
    if (owner[column] != 0) chosen[owner[column] - 1] = static_cast<uint32_t>(column - 1);
  return chosen;
}

}  // namespace asyncfabric::topology
