// devices.h: the rooms that read one kind of device each out of a tree. Used by topology.cc only.
#pragma once

#include <string>
#include <vector>

#include "asyncfabric/topology.h"
#include "topology/tree.h"

namespace asyncfabric::topology {

using Notes = std::vector<std::string>;

std::vector<NumaNode> read_nodes(const Tree& tree, Notes& notes);         // cpus.cc; at least one
std::vector<uint32_t> read_online_cpus(const Tree& tree);                 // cpus.cc
std::vector<uint32_t> read_allowed_cpus(const Tree& tree, Notes& notes);  // cpus.cc; online ones, never none
std::vector<uint32_t> read_core_of_cpus(const Tree& tree, const std::vector<uint32_t>& cpus);  // lowest sibling of each
std::vector<Gpu> read_gpus(const Tree& tree, Notes& notes);                                    // gpus.cc
std::vector<Nic> read_nics(const Tree& tree, Notes& notes);                                    // nics.cc

}  // namespace asyncfabric::topology
