// topology.cc: puts the rooms of this folder together: read, mend what the machine does not report, choose.
#include "asyncfabric/topology.h"

#include <algorithm>

#include "topology/choice.h"
#include "topology/devices.h"
#include "topology/pci.h"
#include "topology/tree.h"

namespace asyncfabric::topology {
namespace {

// numa_node -1 means "not reported". One node only: it is that one. Else local_cpulist may still name exactly one node's CPUs.
// A number of a node that does not exist (seen with cpusets of containers and with hot-unplugged memory) is not reported either.
void mend_node(const Tree& tree, const std::vector<NumaNode>& nodes, const std::string& name, Place& place,
               Notes& notes) {
  const auto exists = [&](const NumaNode& node) { return node.id == place.numa_node; };
  if (place.numa_node != kNoNode && std::none_of(nodes.begin(), nodes.end(), exists)) {
    notes.push_back(name + ": on NUMA node " + std::to_string(place.numa_node) + ", which does not exist");
    place.numa_node = kNoNode;
  }
  if (place.numa_node != kNoNode) return;
  if (nodes.size() == 1) {
    place.numa_node = nodes.front().id;
    return;
  }
  const std::vector<uint32_t> local =
      place.address.empty() ? std::vector<uint32_t>() : parse_list(tree.text(pci_folder(place) + "/local_cpulist"));
  for (const NumaNode& node : nodes)
    if (!local.empty() && node.cpus == local) place.numa_node = node.id;
}

}  // namespace

Topology read_topology(const std::string& root) {
  const Tree tree(root);
  Topology out;
  out.nodes = read_nodes(tree, out.notes);
  out.allowed_cpus = read_allowed_cpus(tree, out.notes);
  out.gpus = read_gpus(tree, out.notes);
  out.nics = read_nics(tree, out.notes);
  for (Gpu& gpu : out.gpus) mend_node(tree, out.nodes, gpu.place.address, gpu.place, out.notes);
  for (Nic& nic : out.nics) mend_node(tree, out.nodes, nic.name, nic.place, out.notes);
  choose_nics(out);
  choose_cpus(out, read_core_of_cpus(tree, out.allowed_cpus));
  return out;
}

}  // namespace asyncfabric::topology
