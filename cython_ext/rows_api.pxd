# rows_api.pxd: what Cython sees of the row loops, a twin of native/include/asyncfabric/rows.h.
# Declarations only.

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool as cpp_bool


cdef extern from "<span>" namespace "std" nogil:
    cdef cppclass const_floats "std::span<const float>":
        const_floats()
        const_floats(const float*, size_t)

    cdef cppclass floats "std::span<float>":
        floats()
        floats(float*, size_t)

    cdef cppclass const_ints "std::span<const int64_t>":
        const_ints()
        const_ints(const int64_t*, size_t)

    cdef cppclass ints "std::span<int64_t>":
        ints()
        ints(int64_t*, size_t)

    cdef cppclass const_experts "std::span<const int32_t>":
        const_experts()
        const_experts(const int32_t*, size_t)

    cdef cppclass experts_span "std::span<int32_t>":
        experts_span()
        experts_span(int32_t*, size_t)

    cdef cppclass RowFront "std::span<uint8_t>":
        RowFront()
        RowFront(uint8_t*, size_t)

    cdef cppclass const_fronts "std::span<const std::span<uint8_t>>":
        const_fronts()
        const_fronts(const RowFront*, size_t)


cdef extern from "asyncfabric/rows.h" namespace "asyncfabric::rows" nogil:
    cdef enum class RowKind(uint32_t):
        pass

    cdef cppclass RowSource "asyncfabric::rows::Source":
        const uint8_t* data
        size_t count
        size_t row_bytes

    cdef cppclass RowTarget "asyncfabric::rows::Target":
        uint8_t* data
        size_t count
        size_t row_bytes

    cdef cppclass RowPart "asyncfabric::rows::Part":
        int64_t begin
        int64_t end
        int64_t at

    cdef cppclass const_parts "std::span<const asyncfabric::rows::Part>":
        const_parts()
        const_parts(const RowPart*, size_t)

    cdef cppclass GoingRows:
        int64_t begin
        int64_t end
        RowTarget target

    cdef cppclass ComingRows:
        int64_t begin
        int64_t end
        RowSource source
        cpp_bool picks
        const_ints picked

    cdef cppclass const_going "std::span<const asyncfabric::rows::GoingRows>":
        const_going()
        const_going(const GoingRows*, size_t)

    cdef cppclass const_coming "std::span<const asyncfabric::rows::ComingRows>":
        const_coming()
        const_coming(const ComingRows*, size_t)

    cdef cppclass RowPairs "asyncfabric::rows::Pairs":
        ints position
        floats weights
        ints row_of
        ints choice_of

    cdef cppclass RecordHead:
        uint32_t magic
        uint32_t member
        uint64_t step
        uint32_t rows
        uint32_t members

    cdef cppclass RowsAbout "asyncfabric::rows::About":
        const_experts origins
        const_experts experts
        const_floats weights
        const_floats scales
        size_t choices
        size_t scales_of_row

    cdef cppclass RowsReadAbout "asyncfabric::rows::ReadAbout":
        experts_span origins
        experts_span experts
        floats weights
        floats scales
        size_t choices
        size_t scales_of_row

    cdef enum class HeadVerdict(uint32_t):
        kFine
        kOtherRecord
        kTooManyRows
        kMisuse

    cdef cppclass HeadCheck:
        HeadVerdict verdict
        size_t member
        RecordHead head

    cpp_bool native_take_rows "asyncfabric::rows::take_rows"(RowSource, const_ints, const_going) noexcept
    cpp_bool native_spread_rows "asyncfabric::rows::spread_rows"(
        const_coming, const_ints, const_ints, RowTarget) noexcept
    cpp_bool native_weigh_rows "asyncfabric::rows::weigh_rows"(
        RowSource, RowKind, const_ints, const_ints, const_floats, const_going) noexcept
    cpp_bool native_add_rows "asyncfabric::rows::add_rows"(
        RowSource, RowKind, const_ints, const_parts, RowTarget) noexcept
    cpp_bool native_gather_sums "asyncfabric::rows::gather_sums"(
        RowSource, RowKind, const_ints, const_parts, floats) noexcept
    int64_t native_count_pairs "asyncfabric::rows::count_pairs"(
        const_experts, size_t, int32_t, int64_t, ints, ints, ints) noexcept
    cpp_bool native_place_pairs "asyncfabric::rows::place_pairs"(
        const_experts, const_floats, size_t, int32_t, const_ints, const RowPairs&) noexcept
    const char* native_sums_kind "asyncfabric::rows::sums_kind"()
    int64_t native_plan_route "asyncfabric::rows::plan_route"(
        const_experts, size_t, const_ints, ints, ints) noexcept
    cpp_bool native_write_records "asyncfabric::rows::write_records"(
        const_fronts, uint32_t, uint64_t, const RowsAbout&, const_ints, const_ints, const_ints) noexcept
    HeadCheck native_read_heads "asyncfabric::rows::read_heads"(
        const_fronts, uint32_t, uint64_t, uint64_t, ints, ints) noexcept
    cpp_bool native_read_rows "asyncfabric::rows::read_rows"(const_fronts, const_ints, const RowsReadAbout&) noexcept
