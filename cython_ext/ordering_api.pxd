# ordering_api.pxd: what Cython sees of putting in order, a twin of native/include/asyncfabric/ordering.h.
# Declarations only.

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint64_t
from libcpp cimport bool as cpp_bool

from rows_api cimport const_ints


cdef extern from "<span>" namespace "std" nogil:
    cdef cppclass ordered_bytes "std::span<uint8_t>":
        ordered_bytes()
        ordered_bytes(uint8_t*, size_t)


cdef extern from "asyncfabric/ordering.h" namespace "asyncfabric::rows" nogil:
    cdef cppclass OrderRuns "asyncfabric::rows::Runs":
        const uint8_t* data
        const_ints sizes
        const_ints strides
        size_t run_bytes
        cpp_bool measure(size_t*, size_t*) noexcept

    cpp_bool native_order_and_sum "asyncfabric::rows::order_and_sum"(
        const OrderRuns&, ordered_bytes, cpp_bool, uint64_t*) noexcept
