// choice.h: which NICs serve which GPU, and on which cores the workers run. Pure functions of what was read.
#pragma once

#include <string>
#include <vector>

#include "asyncfabric/topology.h"

namespace asyncfabric::topology {

// Fills groups (without CPUs) and spare_nics from nodes, gpus and nics.
void choose_nics(Topology& topology);

// Fills each group's node, CPUs and worker core. `core_of[i]`: the physical core of allowed_cpus[i].
void choose_cpus(Topology& topology, const std::vector<uint32_t>& core_of);

}  // namespace asyncfabric::topology
