# batches_api.pxd: what one call of the engine may name many of, a twin of native/include/asyncfabric/types.h.
# Declarations only.

from libc.stdint cimport int64_t, uint64_t


cdef extern from "asyncfabric/types.h" namespace "asyncfabric" nogil:
    cdef cppclass ScatterTarget:
        uint64_t key
        uint64_t source_offset
        uint64_t target_offset
        uint64_t length

    cdef cppclass PageBatch:
        const int64_t* source_pages
        const int64_t* target_pages
        uint64_t count
        uint64_t page_bytes
        uint64_t source_stride
        uint64_t target_stride
        uint64_t source_offset
        uint64_t target_offset

    cdef cppclass BoxBatch:
        const int64_t* rows
        uint64_t count
        uint64_t dimensions
        uint64_t* sums
