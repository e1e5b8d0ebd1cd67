# topology_api.pxd: what Cython sees of the topology, a twin of native/include/asyncfabric/topology.h.
# Declarations only.

from libc.stdint cimport int32_t, uint32_t, uint64_t
from libcpp cimport bool as cpp_bool
from libcpp.string cimport string
from libcpp.vector cimport vector


cdef extern from "asyncfabric/topology.h" namespace "asyncfabric::topology" nogil:
    cdef enum class NicKind(uint32_t):
        pass

    cdef enum class Distance(uint32_t):
        pass

    cdef cppclass Place:
        string address
        vector[string] path
        int32_t numa_node

    cdef cppclass NumaNode:
        int32_t id
        vector[uint32_t] cpus
        vector[uint32_t] distances
        uint64_t memory_bytes

    cdef cppclass Gpu:
        Place place
        uint32_t device_id
        string driver
        string model

    cdef cppclass Nic:
        string name
        NicKind kind
        Place place
        vector[string] netdevs
        double gbits_per_s
        cpp_bool up
        cpp_bool software
        cpp_bool virtual_function

    cdef cppclass Group:
        int32_t gpu
        vector[uint32_t] nics
        int32_t numa_node
        vector[uint32_t] cpus
        cpp_bool cpus_are_near
        int32_t worker_cpu

    cdef cppclass Topology:
        vector[NumaNode] nodes
        vector[uint32_t] allowed_cpus
        vector[Gpu] gpus
        vector[Nic] nics
        vector[Group] groups
        vector[uint32_t] spare_nics
        vector[string] notes

    Topology read_topology_tree "asyncfabric::topology::read_topology"(const string&) except +
    Distance distance_between(const Place&, const Place&)
    vector[uint32_t] nics_for_node_of "asyncfabric::topology::nics_for_node"(const Topology&, int32_t) except +
