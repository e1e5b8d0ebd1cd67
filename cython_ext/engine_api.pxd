# engine_api.pxd: what Cython sees of the native engine, a line-by-line twin of native/include/asyncfabric.
# Declarations only. Everything here may run without the GIL; `except +` turns a failed allocation into MemoryError
# and costs nothing on the good path.

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint16_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool as cpp_bool
from libcpp.memory cimport shared_ptr, unique_ptr
from libcpp.string cimport string
from libcpp.vector cimport vector

from batches_api cimport BoxBatch, PageBatch, ScatterTarget
from rails_api cimport EngineConfig, LeftOutRail, RailInfo


cdef extern from "<string_view>" namespace "std" nogil:
    cdef cppclass string_view:
        string_view()
        string_view(const char*, size_t)
        const char* data() const


cdef extern from "asyncfabric/status.h" namespace "asyncfabric" nogil:
    cdef enum class StatusKind(uint16_t):
        kNone
        kBusy
        kClosed
        kValue
        kDevice

    cdef enum class StatusCode(uint16_t):
        kOk
        kBusy
        kClosed
        kInvalidArgument
        kNoMemory
        kTimeout

    cdef cppclass Status:
        StatusCode code
        StatusKind kind
        int32_t raw
        Status()
        Status(StatusCode)
        Status(StatusCode, int32_t)
        cpp_bool ok() const

    const char* status_text(StatusCode)


cdef extern from "asyncfabric/types.h" namespace "asyncfabric" nogil:
    const int32_t kHostDevice

    cdef cppclass ReceivedMessage:
        uint64_t peer
        string payload

    cdef enum class CompletionKind(uint32_t):
        kOp

    cdef cppclass Completion:
        uint64_t cookie
        CompletionKind kind
        Status status
        uint64_t value
        uint64_t bytes
        uint64_t duration_ns
        uint64_t rails
        uint64_t peer

    cdef cppclass RegionInfo:
        void* base
        uint64_t length
        int32_t device
        uint32_t access
        uint64_t generation
        cpp_bool quarantined
        string refused

    cdef cppclass KeyInfo:
        uint64_t incarnation
        uint64_t region
        uint64_t generation
        uint64_t length
        uint32_t access
        uint32_t rails

    cdef cppclass PeerInfo:
        uint64_t id
        uint64_t incarnation
        uint32_t state
        uint32_t lanes
        string provider
        uint64_t bytes_sent
        uint64_t ops_in_flight

    cdef cppclass OpProgress:
        uint64_t bytes_total
        uint64_t bytes_posted
        uint64_t bytes_done
        uint64_t outstanding
        uint64_t peer
        cpp_bool known

    cdef enum class TracePoint(uint64_t):
        kSubmit

    cdef cppclass TraceEvent:
        uint64_t time_ns
        TracePoint what
        uint64_t subject
        uint64_t value

    cdef cppclass EngineStatistics:
        uint64_t ops_submitted
        uint64_t ops_completed
        uint64_t ops_failed
        uint64_t ops_cancelled
        uint64_t bytes_written
        uint64_t bytes_read
        uint64_t work_requests
        uint64_t immediates_sent
        uint64_t immediates_received
        uint64_t stale_arrivals
        uint64_t early_arrivals
        uint64_t messages_received
        uint64_t messages_refused
        uint64_t steps
        uint64_t sleeps
        uint64_t loop_wakes
        uint64_t inline_steps
        uint64_t regions
        uint64_t registered_bytes
        uint64_t peers
        uint64_t quarantined_regions
        uint64_t unconfirmed_closes


cdef extern from "asyncfabric/engine.h" namespace "asyncfabric" nogil:
    void* alias_pages(void*, uint64_t) noexcept

    cdef cppclass ClosingInfo:
        uint32_t imm
        uint64_t age_ns
        vector[uint64_t] peers

    cdef cppclass NativeEngine "asyncfabric::Engine":
        @staticmethod
        Status open(const EngineConfig&, unique_ptr[NativeEngine]*, string*) except +

        @staticmethod
        Status check_address(string_view, uint64_t*) except +

        string address() except +
        uint64_t incarnation() except +
        vector[RailInfo] rails() except +
        vector[LeftOutRail] rails_left_out() except +
        vector[PeerInfo] peers() except +
        EngineStatistics statistics() except +
        OpProgress progress(uint64_t) except +
        string last_error() except +
        string reason(uint64_t) except +

        Status submit_register(uint64_t, void*, uint64_t, int32_t, uint32_t) except +
        Status submit_allocate(uint64_t, uint64_t, int32_t, uint32_t) except +
        Status submit_revoke(uint64_t, uint64_t) except +
        Status submit_release(uint64_t, uint64_t) except +
        Status submit_connect(uint64_t, string_view) except +
        Status submit_disconnect(uint64_t, uint64_t) except +
        Status submit_close(uint64_t, cpp_bool) except +

        Status region_info(uint64_t, RegionInfo*) except +
        Status region_key(uint64_t, uint32_t, uint64_t, uint64_t, cpp_bool, string*) except +
        Status open_key(string_view, uint64_t*, KeyInfo*) except +
        void close_key(uint64_t) except +
        uint64_t peer_of_key(uint64_t) except +
        shared_ptr[uint8_t] key_memory(uint64_t, uint64_t*) except +

        Status submit_write(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, int64_t, uint64_t*,
                            uint64_t) except +
        Status submit_read(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t*) except +
        Status submit_write_pages(uint64_t, uint64_t, uint64_t, const PageBatch&, int64_t, uint64_t*, uint64_t) except +
        Status submit_read_pages(uint64_t, uint64_t, uint64_t, const PageBatch&, uint64_t*) except +
        Status submit_write_boxes(uint64_t, uint64_t, uint64_t, const BoxBatch&, int64_t, uint64_t*) except +
        Status submit_scatter(uint64_t, uint64_t, const ScatterTarget*, size_t, int64_t, uint64_t*) except +
        Status submit_signal(uint64_t, const uint64_t*, size_t, int64_t, uint64_t*) except +
        Status submit_send(uint64_t, uint64_t, const void*, size_t, uint64_t*) except +
        Status cancel(uint64_t) except +
        Status arm_writable(uint64_t) except +

        Status open_counter(int64_t, uint64_t*, uint32_t*) except +
        void close_counter(uint64_t) except +
        Status arm_closed(uint64_t, uint32_t) except +
        vector[ClosingInfo] closings(int64_t) except +
        uint64_t counter_value(uint64_t) except +
        Status arm_counter(uint64_t, uint64_t, uint64_t) except +
        Status spin_counter(uint64_t, uint64_t, uint64_t, uint64_t*) except +

        Status mark_stream(void*, int32_t, uint64_t*) except +
        Status mark_word(uint64_t, uint64_t, uint64_t*) except +
        void drop_mark(uint64_t) except +
        Status counter_flag(uint64_t, uint64_t**) except +
        Status stream_wait(uint64_t, void*, int32_t, uint64_t) except +
        Status open_watch(uint64_t*, uint64_t**) except +
        Status arm_watch(uint64_t, uint64_t, uint64_t) except +
        void close_watch(uint64_t) except +
        void notify() except +

        int completion_fd() except +
        cpp_bool arm() except +
        void disarm() except +
        size_t poll(Completion*, size_t) except +
        void assist() except +
        cpp_bool look() except +
        void take_messages(size_t, vector[ReceivedMessage]*) except +
        Status spin_messages(size_t, uint64_t, vector[ReceivedMessage]*) except +
        size_t step() except +

        void set_trace(cpp_bool) except +
        vector[TraceEvent] take_trace() except +


cdef extern from "asyncfabric/build_info.h" namespace "asyncfabric" nogil:
    vector[string] provider_names() except +
