// distance.cc: how far apart two places are, by what their PCI paths share and by their NUMA nodes. See proximity.h.
#include <algorithm>

#include "topology/proximity.h"

namespace asyncfabric::topology {
namespace {

constexpr uint32_t kUnknownNode = 255;  // no firmware reports more

size_t shared_steps(const Place& one, const Place& other) {
  const size_t most = std::min(one.path.size(), other.path.size());
  size_t shared = 0;
  while (shared < most && one.path[shared] == other.path[shared]) ++shared;
  return shared;
}

std::string_view slot(const std::string& address) { return std::string_view(address).substr(0, address.rfind('.')); }

}  // namespace

Distance distance_between(const Place& one, const Place& other) {
  if (!one.address.empty() && !other.address.empty() && slot(one.address) == slot(other.address))
    return Distance::kSame;
  const size_t shared = shared_steps(one, other);
  if (shared > 1) return Distance::kSwitch;  // the host bridge, and at least one port below it
  const bool known = one.numa_node != kNoNode && other.numa_node != kNoNode;
  if (known && one.numa_node != other.numa_node) return Distance::kFar;
  if (shared == 1) return Distance::kRootComplex;
  return known ? Distance::kNode : Distance::kFar;
}

const char* distance_name(Distance distance) {
  switch (distance) {
    case Distance::kSame: return "same device";
    case Distance::kSwitch: return "same switch";
    case Distance::kRootComplex: return "same root complex";
    case Distance::kNode: return "same NUMA node";
    case Distance::kFar: return "other NUMA node";
  }
  return "unknown";
}

uint32_t node_distance(const std::vector<NumaNode>& nodes, int32_t one, int32_t other) {
  const auto index = [&](int32_t id) {
    return std::find_if(nodes.begin(), nodes.end(), [&](const NumaNode& node) { return node.id == id; }) -
           nodes.begin();
  };
  const size_t from = static_cast<size_t>(index(std::min(one, other)));  // tables of broken firmware are not symmetric
  const size_t to = static_cast<size_t>(index(std::max(one, other)));
  if (from >= nodes.size() || to >= nodes[from].distances.size()) return kUnknownNode;
  return nodes[from].distances[to];
}

Proximity proximity(const std::vector<NumaNode>& nodes, const Place& one, const Place& other) {
  const size_t shared = shared_steps(one, other);
  return {distance_between(one, other), node_distance(nodes, one.numa_node, other.numa_node),
          static_cast<uint32_t>(one.path.size() + other.path.size() - 2 * shared)};
}

}  // namespace asyncfabric::topology
