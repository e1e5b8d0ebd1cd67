# rows.pxi: the row loops of asyncfabric.moe over numpy arrays, with the GIL released. Which row goes where is decided
# above; what points outside an array is refused here and nothing is written.

cdef object rows_refused(str what):
    return IndexError(f"{what}: sizes do not fit each other, or an index points outside")


cdef RowSource rows_from(const unsigned char[:, ::1] rows):
    cdef RowSource source
    source.data = &rows[0, 0] if rows.shape[0] and rows.shape[1] else NULL
    source.count = rows.shape[0]
    source.row_bytes = rows.shape[1]
    return source


cdef RowTarget rows_into(unsigned char[:, ::1] rows):
    cdef RowTarget target
    target.data = &rows[0, 0] if rows.shape[0] and rows.shape[1] else NULL
    target.count = rows.shape[0]
    target.row_bytes = rows.shape[1]
    return target


cdef const_ints ints_of(const int64_t[::1] numbers):
    return const_ints(&numbers[0] if numbers.shape[0] else NULL, numbers.shape[0])


cdef ints ints_into(int64_t[::1] numbers):
    return ints(&numbers[0] if numbers.shape[0] else NULL, numbers.shape[0])


cdef const_experts experts_of(const int32_t[:, ::1] experts):
    cdef size_t count = experts.shape[0] * experts.shape[1]
    return const_experts(&experts[0, 0] if count else NULL, count)


cdef const_floats floats_of(const float[:, ::1] numbers):
    cdef size_t count = numbers.shape[0] * numbers.shape[1]
    return const_floats(&numbers[0, 0] if count else NULL, count)


cdef floats floats_into(float[:, ::1] numbers):
    cdef size_t count = numbers.shape[0] * numbers.shape[1]
    return floats(&numbers[0, 0] if count else NULL, count)


cdef const_parts parts_of(const int64_t[:, ::1] parts) except *:
    if parts.shape[1] != 3:
        raise ValueError(f"a part has a begin, an end and a place, got {parts.shape[1]} numbers")
    return const_parts(<const RowPart*> &parts[0, 0] if parts.shape[0] else NULL, parts.shape[0])


cdef class _RowExports:
    """The exports of several arrays, held while a loop runs on them."""

    cdef vector[Py_buffer] held_

    def __dealloc__(self):
        for i in range(self.held_.size()):
            PyBuffer_Release(&self.held_[i])

    cdef Py_buffer hold(self, object array, int flags) except *:
        cdef Py_buffer view
        PyObject_GetBuffer(array, &view, flags)
        self.held_.push_back(view)
        return view

    cdef vector[RowFront] fronts(self, object arrays, int flags) except *:
        cdef vector[RowFront] found
        cdef Py_buffer view
        for array in arrays:
            view = self.hold(array, flags)
            found.push_back(RowFront(<uint8_t*> view.buf, view.len))
        return found

    cdef RowTarget rows(self, object array, int flags) except *:
        cdef Py_buffer view = self.hold(array, flags | PyBUF_ND)
        cdef RowTarget found
        if view.ndim != 2 or view.itemsize != 1:
            raise ValueError(f"rows are bytes of two dimensions, got {view.ndim} and elements of {view.itemsize} bytes")
        found.data, found.count, found.row_bytes = <uint8_t*> view.buf, view.shape[0], view.shape[1]
        return found

    cdef vector[GoingRows] going(self, spans, targets) except *:
        cdef vector[GoingRows] found
        cdef GoingRows part
        for (begin, end), target in zip(spans, targets, strict=True):
            part.begin, part.end, part.target = begin, end, self.rows(target, PyBUF_WRITABLE)
            found.push_back(part)
        return found

    cdef vector[ComingRows] coming(self, spans, sources, picked) except *:
        cdef vector[ComingRows] found
        cdef ComingRows part
        cdef RowTarget rows
        cdef const int64_t[::1] numbers
        for (begin, end), source, index in zip(spans, sources, picked, strict=True):
            rows = self.rows(source, PyBUF_SIMPLE)
            part.begin, part.end, part.picks = begin, end, index is not None
            part.source.data, part.source.count, part.source.row_bytes = rows.data, rows.count, rows.row_bytes
            if part.picks:
                self.hold(index, PyBUF_ND)
                numbers = index
                part.picked = ints_of(numbers)
            found.push_back(part)
        return found


class row_loops:  # a namespace: the module has loops of other systems too
    """The row loops; see asyncfabric._kernels.rows."""

    @staticmethod
    def take_rows(const unsigned char[:, ::1] source, const int64_t[::1] index, spans, targets) -> None:
        """Make the first rows of each target the rows index[begin:end] of the source, for its span."""
        cdef RowSource rows = rows_from(source)
        cdef const_ints taken = ints_of(index)
        cdef _RowExports held = _RowExports.__new__(_RowExports)
        cdef vector[GoingRows] going = held.going(spans, targets)
        cdef bint fine
        with nogil:
            fine = native_take_rows(rows, taken, const_going(going.data(), going.size()))
        if not fine:
            raise rows_refused("take_rows")

    @staticmethod
    def spread_rows(spans, sources, picked, const int64_t[::1] pair_offsets, const int64_t[::1] position,
                    unsigned char[:, ::1] target) -> None:
        """Copy each row of the spans to the rows position[pair_offsets[row]:pair_offsets[row + 1]] of the target."""
        cdef _RowExports held = _RowExports.__new__(_RowExports)
        cdef vector[ComingRows] coming = held.coming(spans, sources, picked)
        cdef RowTarget out = rows_into(target)
        cdef const_ints offsets = ints_of(pair_offsets)
        cdef const_ints places = ints_of(position)
        cdef bint fine
        with nogil:
            fine = native_spread_rows(const_coming(coming.data(), coming.size()), offsets, places, out)
        if not fine:
            raise rows_refused("spread_rows")

    @staticmethod
    def weigh_rows(const unsigned char[:, ::1] source, uint32_t kind, const int64_t[::1] pair_offsets,
                   const int64_t[::1] position, const float[::1] weights, spans, targets) -> None:
        """Make each row of the spans the fp32 sum of weights[p] * source[position[p]] over its pairs, rounded once."""
        cdef RowSource rows = rows_from(source)
        cdef const_ints offsets = ints_of(pair_offsets)
        cdef const_ints places = ints_of(position)
        cdef const_floats factors = const_floats(&weights[0] if weights.shape[0] else NULL, weights.shape[0])
        cdef _RowExports held = _RowExports.__new__(_RowExports)
        cdef vector[GoingRows] going = held.going(spans, targets)
        cdef bint fine
        with nogil:
            fine = native_weigh_rows(rows, <RowKind> kind, offsets, places, factors,
                                     const_going(going.data(), going.size()))
        if not fine:
            raise rows_refused("weigh_rows")

    @staticmethod
    def add_rows(const unsigned char[:, ::1] source, uint32_t kind, const int64_t[::1] tokens,
                 const int64_t[:, ::1] parts, unsigned char[:, ::1] target) -> None:
        """Make row t of the target the fp32 sum of the source rows that the parts have for token t, rounded once."""
        cdef RowSource rows = rows_from(source)
        cdef RowTarget out = rows_into(target)
        cdef const_ints listed = ints_of(tokens)
        cdef const_parts senders = parts_of(parts)
        cdef bint fine
        with nogil:
            fine = native_add_rows(rows, <RowKind> kind, listed, senders, out)
        if not fine:
            raise rows_refused("add_rows")

    @staticmethod
    def gather_sums(const unsigned char[:, ::1] source, uint32_t kind, const int64_t[::1] tokens,
                    const int64_t[:, ::1] parts, float[:, ::1] sums) -> None:
        """Add to row t of the sums the source rows that the parts have for token t, in the order of parts."""
        cdef RowSource rows = rows_from(source)
        cdef const_ints listed = ints_of(tokens)
        cdef const_parts senders = parts_of(parts)
        cdef floats kept = floats_into(sums)
        cdef bint fine
        with nogil:
            fine = native_gather_sums(rows, <RowKind> kind, listed, senders, kept)
        if not fine:
            raise rows_refused("gather_sums")

    @staticmethod
    def count_pairs(const int32_t[:, ::1] experts, int32_t first, int64_t alignment, int64_t[::1] counts,
                    int64_t[::1] begins, int64_t[::1] pair_offsets) -> int:
        """Count the pairs of rows and experts from `first` on; fills the last three, returns the number."""
        cdef const_experts listed = experts_of(experts)
        cdef size_t choices = experts.shape[1]
        cdef ints numbers = ints_into(counts)
        cdef ints starts = ints_into(begins)
        cdef ints offsets = ints_into(pair_offsets)
        cdef int64_t pairs
        with nogil:
            pairs = native_count_pairs(listed, choices, first, alignment, numbers, starts, offsets)
        if pairs < 0:
            raise rows_refused("count_pairs")
        return pairs

    @staticmethod
    def place_pairs(const int32_t[:, ::1] experts, const float[:, ::1] weights, int32_t first,
                    const int64_t[::1] begins, int64_t[::1] position, float[::1] pair_weights, int64_t[::1] row_of,
                    int64_t[::1] choice_of) -> None:
        """Give each pair its output row and its weight; experts begin at `begins`."""
        cdef const_experts listed = experts_of(experts)
        cdef const_floats factors = floats_of(weights)
        cdef size_t choices = experts.shape[1]
        cdef const_ints starts = ints_of(begins)
        cdef RowPairs pairs
        pairs.position = ints_into(position)
        pairs.weights = floats(&pair_weights[0] if pair_weights.shape[0] else NULL, pair_weights.shape[0])
        pairs.row_of = ints_into(row_of)
        pairs.choice_of = ints_into(choice_of)
        cdef bint fine
        with nogil:
            fine = native_place_pairs(listed, factors, choices, first, starts, pairs)
        if not fine:
            raise rows_refused("place_pairs")

    @staticmethod
    def sums_kind() -> str:
        """Return which instructions the sums use: avx512, avx2 or plain."""
        return (<bytes> native_sums_kind()).decode("ascii")
