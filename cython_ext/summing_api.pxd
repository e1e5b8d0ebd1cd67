# summing_api.pxd: what Cython sees of sums of many boxes, a twin of native/include/asyncfabric/summing.h.
# Declarations only.

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libcpp cimport bool as cpp_bool

from rows_api cimport const_ints


cdef extern from "<span>" namespace "std" nogil:
    cdef cppclass found_sums "std::span<uint64_t>":
        found_sums()
        found_sums(uint64_t*, size_t)

    cdef cppclass summed_bytes "std::span<const uint8_t>":
        summed_bytes()
        summed_bytes(const uint8_t*, size_t)


cdef extern from "asyncfabric/summing.h" namespace "asyncfabric::rows" nogil:
    cdef cppclass NativeBoxTable "asyncfabric::rows::BoxTable":
        const_ints stretches
        const_ints at
        const_ints run_bytes
        const_ints dimensions
        const_ints sizes
        const_ints strides
        cpp_bool measure(size_t*) noexcept

    cpp_bool native_sum_boxes "asyncfabric::rows::sum_boxes"(
        const uint8_t*, const NativeBoxTable&, const_ints, found_sums) noexcept

    uint64_t native_sum_words "asyncfabric::rows::sum_words"(summed_bytes, uint32_t) noexcept
