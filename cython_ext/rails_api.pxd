# rails_api.pxd: what Cython sees of how an engine is opened and of its rails, a twin of that part of
# native/include/asyncfabric/types.h. Declarations only.

from libc.stdint cimport int32_t, uint32_t, uint64_t
from libcpp cimport bool as cpp_bool
from libcpp.pair cimport pair
from libcpp.string cimport string
from libcpp.vector cimport vector


cdef extern from "asyncfabric/types.h" namespace "asyncfabric" nogil:
    cdef enum class PollingMode(uint32_t):
        kAdaptive

    cdef cppclass RailSpec:
        string provider
        string device
        vector[pair[string, string]] options
        cpp_bool optional
        string reason

    cdef cppclass LeftOutRail:
        string rail
        string reason

    cdef cppclass EngineConfig:
        vector[RailSpec] rails
        cpp_bool automatic
        PollingMode polling
        uint64_t spin_ns
        uint64_t drain_deadline_ns
        uint64_t connect_deadline_ns
        uint64_t peer_deadline_network_ns
        uint64_t peer_deadline_host_ns
        uint64_t stripe_bytes
        uint64_t inline_bytes
        uint32_t max_ops
        int32_t worker_cpu
        string secret

    cdef cppclass RailInfo:
        string provider
        string device
        string library
        string version
        double gbits_per_s
        cpp_bool ordered
        cpp_bool can_read
        cpp_bool can_gather
        cpp_bool up
        string reason
        string admission
