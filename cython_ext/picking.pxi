# picking.pxi: offsets of the pages that two lists of positions choose, each read, checked and looked up in one pass.
# Under the GIL: lists are of Python's integers, and giving it up would cost more than most of them.

from cpython.list cimport PyList_CheckExact, PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact

ctypedef fused position_t:
    int32_t
    uint32_t
    int64_t
    uint64_t


cdef bint pick_numbers(const position_t* positions, Py_ssize_t count, const int64_t* offsets, uint64_t room,
                       int64_t* chosen) noexcept nogil:
    """Look numbers up; False where one is outside. A negative one is larger than every room as an unsigned one."""
    cdef Py_ssize_t i
    cdef uint64_t position
    for i in range(count):
        position = <uint64_t> <int64_t> positions[i]
        if position >= room:
            return False
        chosen[i] = offsets[position]
    return True


cdef bint pick_list(list positions, Py_ssize_t count, const int64_t* offsets, uint64_t room, int64_t* chosen) except -1:
    """Look Python's integers up; False where one is outside, or something else."""
    cdef Py_ssize_t i
    cdef int overflow = 0
    cdef long long position
    cdef object number
    if PyList_GET_SIZE(positions) != count:
        return False
    for i in range(count):
        number = <object> PyList_GET_ITEM(positions, i)
        if not PyLong_CheckExact(number):
            return False
        position = PyLong_AsLongLongAndOverflow(number, &overflow)
        if overflow or <uint64_t> position >= room:
            return False
        chosen[i] = offsets[position]
    return True


cdef bint pick_array(object positions, Py_ssize_t count, const int64_t* offsets, uint64_t room,
                     int64_t* chosen) except -1:
    """Look the numbers of an array up; False where one is outside, or the array is no flat one of integers."""
    cdef Py_buffer view
    cdef char kind
    try:
        PyObject_GetBuffer(positions, &view, PyBUF_FORMAT | PyBUF_ND)
    except (BufferError, TypeError, ValueError):
        return False
    try:
        if view.ndim != 1 or view.shape[0] != count or view.format == NULL or view.format[1] != 0:
            return False
        kind = view.format[0]
        if kind in (c'i', c'l', c'q'):
            if view.itemsize == 4:
                return pick_numbers(<const int32_t*> view.buf, count, offsets, room, chosen)
            return pick_numbers(<const int64_t*> view.buf, count, offsets, room, chosen)
        if kind in (c'I', c'L', c'Q'):
            if view.itemsize == 4:
                return pick_numbers(<const uint32_t*> view.buf, count, offsets, room, chosen)
            return pick_numbers(<const uint64_t*> view.buf, count, offsets, room, chosen)
        return False
    finally:
        PyBuffer_Release(&view)


cdef bint pick_side(object positions, object offsets, int64_t* chosen, Py_ssize_t count) except -1:
    cdef Py_buffer table
    PyObject_GetBuffer(offsets, &table, PyBUF_SIMPLE)
    try:
        if PyList_CheckExact(positions):
            return pick_list(positions, count, <const int64_t*> table.buf, table.len // 8, chosen)
        return pick_array(positions, count, <const int64_t*> table.buf, table.len // 8, chosen)
    finally:
        PyBuffer_Release(&table)


cdef bint one_piece(const int64_t* offsets, Py_ssize_t count, int64_t page_bytes) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(1, count):
        if offsets[i] - offsets[i - 1] != page_bytes:
            return False
    return True


class picking:  # a namespace
    """See asyncfabric._kernels.picking."""

    @staticmethod
    def pick_pairs(first, first_offsets, second, second_offsets, int64_t page_bytes, chosen) -> int:
        """Write the offsets at two lists of positions into two rows; return 1 for one piece, 0 for pages, else -1."""
        cdef Py_buffer out
        cdef Py_ssize_t count
        cdef int64_t* rows
        PyObject_GetBuffer(chosen, &out, PyBUF_WRITABLE)
        try:
            count = out.len // 16
            rows = <int64_t*> out.buf
            if not pick_side(first, first_offsets, rows, count):
                return -1
            if not pick_side(second, second_offsets, rows + count, count):
                return -1
            return one_piece(rows, count, page_bytes) and one_piece(rows + count, count, page_bytes)
        finally:
            PyBuffer_Release(&out)
