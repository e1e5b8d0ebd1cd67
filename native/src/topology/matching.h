// matching.h: the cheapest way to give each row a column of its own (the assignment problem). Pure, deterministic.
#pragma once

#include <cstdint>
#include <vector>

namespace asyncfabric::topology {

// costs[row][column], at least as many columns as rows, each cost in 0..2^52. Returns the column of each row.
std::vector<uint32_t> cheapest_columns(const std::vector<std::vector<int64_t>>& costs);

}  // namespace asyncfabric::topology
