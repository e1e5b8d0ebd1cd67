"""`asyncfabric topo`: the machine's GPUs, NICs, NUMA nodes and CPUs, and which serve which. See README.md."""
