# converting_api.pxd: what Cython sees of converting matrices, a twin of native/include/asyncfabric/converting.h.
# Declarations only.

from libc.stddef cimport ptrdiff_t, size_t
from libc.stdint cimport uint8_t
from libcpp cimport bool as cpp_bool

from rows_api cimport RowKind, const_floats, floats


cdef extern from "asyncfabric/converting.h" namespace "asyncfabric::rows" nogil:
    cdef cppclass Plane:
        const uint8_t* data
        size_t rows
        size_t row_bytes
        ptrdiff_t stride
        RowKind kind

    cdef cppclass PlaneTarget:
        uint8_t* data
        size_t rows
        size_t row_bytes
        ptrdiff_t stride
        cpp_bool turned

    cpp_bool native_cast_plane "asyncfabric::rows::cast_plane"(const Plane&, RowKind, const PlaneTarget&) noexcept
    cpp_bool native_quantise_plane "asyncfabric::rows::quantise_plane"(
        const Plane&, size_t, size_t, const_floats, const PlaneTarget&) noexcept
    cpp_bool native_measure_plane "asyncfabric::rows::measure_plane"(const Plane&, size_t, size_t, floats) noexcept
