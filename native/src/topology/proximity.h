// proximity.h: distance with its tie-breakers, for choosing. Pure; compared member by member, smaller is closer.
#pragma once

#include <compare>

#include "asyncfabric/topology.h"

namespace asyncfabric::topology {

struct Proximity {
  Distance distance = Distance::kFar;
  uint32_t node_distance = 0;  // as the firmware reports it, where both nodes are known: 10 local, 21 the other socket
  uint32_t bridges = 0;        // on the way from one to the other
  auto operator<=>(const Proximity&) const = default;
};

Proximity proximity(const std::vector<NumaNode>& nodes, const Place& one, const Place& other);
uint32_t node_distance(const std::vector<NumaNode>& nodes, int32_t one, int32_t other);

}  // namespace asyncfabric::topology
