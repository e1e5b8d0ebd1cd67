# bench_api.pxd: what Cython sees of the bench loops, a twin of native/include/asyncfabric/bench.h and of
# native/src/bench/{engine_loop,libfabric_loop,verbs_loop}.h.
# Declarations only.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libcpp cimport bool as cpp_bool
from libcpp.string cimport string

from batches_api cimport PageBatch
from engine_api cimport NativeEngine, Status


cdef extern from "asyncfabric/bench.h" namespace "asyncfabric::bench" nogil:
    cdef enum class CopyKind(uint32_t):
        kPlain
        kNonTemporal

    cdef cppclass LimitResult:
        int32_t error
        uint64_t elapsed_ns
        uint64_t started_ns

    const char* non_temporal_kind()
    LimitResult copy_loop(CopyKind, void*, const void*, uint64_t, uint64_t, uint64_t)
    LimitResult copy_pages(CopyKind, void*, const void*, const int64_t*, const int64_t*, uint64_t, uint64_t, uint64_t)
    LimitResult cma_loop(int32_t, uint64_t, const void*, uint64_t, uint64_t, uint64_t)
    LimitResult cma_pages(int32_t, uint64_t, const void*, const int64_t*, const int64_t*, uint64_t, uint64_t, uint64_t)
    void allow_cma()
    LimitResult stream_send(int32_t, const void*, uint64_t, uint64_t, uint64_t)
    LimitResult stream_receive(int32_t, void*, uint64_t, uint64_t)
    LimitResult eventfd_ping(int32_t, int32_t, uint64_t, uint64_t*)
    LimitResult eventfd_pong(int32_t, int32_t, uint64_t)
    LimitResult spin_round_trips(uint64_t, uint64_t*)


cdef extern from "bench/engine_loop.h" namespace "asyncfabric::bench" nogil:
    cdef cppclass EngineLoopResult:
        Status status
        uint64_t started_ns
        uint64_t finished_ns
        uint64_t operations

    cdef cppclass WriteLoop:
        uint64_t region
        uint64_t key
        uint64_t region_bytes
        uint64_t op_bytes
        uint64_t window
        uint64_t count
        int64_t imm
        cpp_bool drive
        uint64_t* samples_ns

    cdef cppclass PingLoop:
        uint64_t peer
        uint64_t region
        uint64_t key
        uint64_t op_bytes
        uint64_t counter
        uint64_t base
        int64_t imm
        uint64_t count
        uint64_t deadline_ns
        cpp_bool drive

    EngineLoopResult write_loop(NativeEngine&, const WriteLoop&) except +
    EngineLoopResult pages_loop(NativeEngine&, uint64_t, uint64_t, const PageBatch&, uint64_t, int64_t,
                                cpp_bool, uint64_t*) except +
    EngineLoopResult spin_loop(NativeEngine&, uint64_t, uint64_t, uint64_t) except +
    EngineLoopResult ping_loop(NativeEngine&, const PingLoop&, uint64_t*) except +
    EngineLoopResult pong_loop(NativeEngine&, const PingLoop&) except +


cdef extern from "bench/libfabric_loop.h" namespace "asyncfabric::bench" nogil:
    cdef enum class LoopWorkload(uint32_t):
        kWrites
        kPages
        kPingPong

    cdef cppclass LoopConfig:
        string profile
        LoopWorkload workload
        uint64_t bytes
        uint64_t operations
        uint64_t warmup
        uint32_t window
        uint32_t pages
        uint32_t rounds
        uint64_t region_bytes

    cdef cppclass LoopResult:
        cpp_bool verified
        double seconds
        uint64_t bytes
        uint64_t operations
        double p50_us
        double p99_us
        string provider
        string library
        string error

    int libfabric_target(const LoopConfig&, int, LoopResult*) except +
    int libfabric_initiator(const LoopConfig&, int, LoopResult*) except +


cdef extern from "bench/verbs_loop.h" namespace "asyncfabric::bench" nogil:
    int verbs_target(const LoopConfig&, int, LoopResult*) except +
    int verbs_initiator(const LoopConfig&, int, LoopResult*) except +
