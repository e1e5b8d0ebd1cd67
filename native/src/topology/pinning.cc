// pinning.cc: on which core the worker of each group runs. See choice.h.
// A worker gets a physical core of its own, on the node of its NICs, or no pin at all: two pinned spinning workers on
// one core, or a worker on the event loop's only core, are worse than what the scheduler would do.
#include <algorithm>
#include <set>

#include "topology/choice.h"
#include "topology/proximity.h"

namespace asyncfabric::topology {
namespace {

using Cpus = std::vector<uint32_t>;

// The node of most of the group's NICs, the lowest of equals; else of its GPU.
int32_t node_of(const Topology& topology, const Group& group) {
  std::vector<int32_t> known;
  for (const uint32_t nic : group.nics)
    if (topology.nics[nic].place.numa_node != kNoNode) known.push_back(topology.nics[nic].place.numa_node);
  if (known.empty())
    return group.gpu == kNoGpu ? kNoNode : topology.gpus[static_cast<size_t>(group.gpu)].place.numa_node;
  std::sort(known.begin(), known.end());
  return *std::max_element(known.begin(), known.end(), [&](int32_t one, int32_t other) {
    return std::count(known.begin(), known.end(), one) < std::count(known.begin(), known.end(), other);
  });
}

Cpus allowed_on(const Topology& topology, const NumaNode& node) {
  Cpus out;
  std::set_intersection(node.cpus.begin(), node.cpus.end(), topology.allowed_cpus.begin(), topology.allowed_cpus.end(),
                        std::back_inserter(out));
  return out;
}

// Of the nearest node with an allowed CPU: memory nodes without CPUs (Grace, CXL) have their near neighbours.
Cpus cpus_near(const Topology& topology, int32_t id, bool* near) {
  *near = false;
  const NumaNode* best = nullptr;
  for (const NumaNode& node : topology.nodes) {
    if (allowed_on(topology, node).empty()) continue;
    if (best == nullptr || node_distance(topology.nodes, id, node.id) < node_distance(topology.nodes, id, best->id))
      best = &node;
  }
  if (id == kNoNode || best == nullptr) return topology.allowed_cpus;
  const auto own =
      std::find_if(topology.nodes.begin(), topology.nodes.end(), [&](const NumaNode& n) { return n.id == id; });
  *near = best->id == id || (own != topology.nodes.end() && own->cpus.empty());
  return allowed_on(topology, *best);
}

}  // namespace

void choose_cpus(Topology& topology, const std::vector<uint32_t>& core_of) {
  const auto core = [&](uint32_t cpu) {
    const auto at = std::lower_bound(topology.allowed_cpus.begin(), topology.allowed_cpus.end(), cpu);
    const auto index = static_cast<size_t>(at - topology.allowed_cpus.begin());
    return index < core_of.size() ? core_of[index] : cpu;
  };
  const std::set<uint32_t> cores(core_of.begin(), core_of.end());
  // As many again for the event loops, and one for the rest: on a smaller machine a pin hurts its neighbours.
  const bool enough = cores.size() > 2 * topology.groups.size();
  std::set<uint32_t> used;
  for (Group& group : topology.groups) {
    group.numa_node = node_of(topology, group);
    group.cpus = cpus_near(topology, group.numa_node, &group.cpus_are_near);
    if (!enough || group.nics.empty()) continue;
    for (const bool spare_core_zero : {true, false}) {  // interrupts and housekeeping like CPU 0
      for (const uint32_t cpu : group.cpus) {
        if (group.worker_cpu != kNoCpu) break;
        if (used.contains(core(cpu)) || (spare_core_zero && core(cpu) == core(0))) continue;
        group.worker_cpu = static_cast<int32_t>(cpu);
        used.insert(core(cpu));
      }
    }
  }
}

}  // namespace asyncfabric::topology
