# rows.pxi: the row loops of asyncfabric.moe over numpy arrays, with the GIL released. Which row goes where is decided
# above; what points outside an array is refused here and nothing is written.

cdef object rows_refused(str what):
    return IndexError(f"{what}: sizes do not fit each other, or an index points outside")


cdef class RowMemory:
    """Rows of bytes in memory that somebody holds; see asyncfabric._kernels.rows."""

    cdef RowTarget rows_
    cdef object owner_

    def __init__(self, uintptr_t address, size_t count, size_t row_bytes, owner):
        """Look at memory that lives as long as the owner."""
        self.rows_.data, self.rows_.count, self.rows_.row_bytes = <uint8_t*> address, count, row_bytes
        self.owner_ = owner

    def __len__(self):
        return self.rows_.count


cdef class _RowExports:
    """The exports of several arrays, held while a loop runs on them. Elements are known by their sizes alone: asking
    numpy for the names of formats costs more than most loops over few rows."""

    cdef vector[Py_buffer] held_

    def __cinit__(self):
        self.held_.reserve(16)

    def __dealloc__(self):
        for i in range(self.held_.size()):
            PyBuffer_Release(&self.held_[i])

    cdef Py_buffer hold(self, object array, int flags, Py_ssize_t element, int dimensions) except *:
        cdef Py_buffer view
        PyObject_GetBuffer(array, &view, flags | PyBUF_ND)
        self.held_.push_back(view)
        if view.ndim != dimensions or view.itemsize != element:
            raise ValueError(f"elements of {element} bytes in {dimensions} dimensions are wanted, got {view.itemsize} "
                             f"bytes in {view.ndim}")
        return view

    cdef const_ints ints_of(self, array) except *:
        cdef Py_buffer view = self.hold(array, PyBUF_SIMPLE, 8, 1)
        return const_ints(<const int64_t*> view.buf, view.shape[0])

    cdef ints ints_into(self, array, int dimensions=1) except *:
        cdef Py_buffer view = self.hold(array, PyBUF_WRITABLE, 8, dimensions)
        return ints(<int64_t*> view.buf, view.len // 8)

    cdef floats floats_into(self, array, int dimensions=2) except *:
        cdef Py_buffer view = self.hold(array, PyBUF_WRITABLE, 4, dimensions)
        return floats(<float*> view.buf, view.len // 4)

    cdef const_floats floats_of(self, array, int dimensions=2) except *:
        cdef Py_buffer view = self.hold(array, PyBUF_SIMPLE, 4, dimensions)
        return const_floats(<const float*> view.buf, view.len // 4)

    cdef const_experts experts_of(self, array, size_t* choices) except *:
        cdef Py_buffer view = self.hold(array, PyBUF_SIMPLE, 4, 2)
        choices[0] = view.shape[1]
        return const_experts(<const int32_t*> view.buf, view.len // 4)

    cdef vector[RowFront] fronts(self, arrays, int flags) except *:
        cdef vector[RowFront] found
        cdef Py_buffer view
        for array in arrays:
            view = self.hold(array, flags, 1, 1)
            found.push_back(RowFront(<uint8_t*> view.buf, view.len))
        return found

    cdef RowTarget rows_into(self, array, int flags=PyBUF_WRITABLE) except *:
        cdef Py_buffer view
        cdef RowTarget found
        if type(array) is RowMemory:
            return (<RowMemory> array).rows_
        view = self.hold(array, flags, 1, 2)
        found.data, found.count, found.row_bytes = <uint8_t*> view.buf, view.shape[0], view.shape[1]
        return found

    cdef RowSource rows_of(self, array) except *:
        cdef RowTarget rows = self.rows_into(array, PyBUF_SIMPLE)
        cdef RowSource found
        found.data, found.count, found.row_bytes = rows.data, rows.count, rows.row_bytes
        return found

    cdef vector[GoingRows] going(self, spans, targets) except *:
        cdef vector[GoingRows] found
        cdef GoingRows part
        for (begin, end), target in zip(spans, targets, strict=True):
            part.begin, part.end, part.target = begin, end, self.rows_into(target)
            found.push_back(part)
        return found

    cdef vector[ComingRows] coming(self, spans, sources, picked) except *:
        cdef vector[ComingRows] found
        cdef ComingRows part
        for (begin, end), source, index in zip(spans, sources, picked, strict=True):
            part.begin, part.end, part.source, part.picks = begin, end, self.rows_of(source), index is not None
            if part.picks:
                part.picked = self.ints_of(index)
            found.push_back(part)
        return found

    cdef vector[RowPart] parts(self, listed) except *:
        cdef vector[RowPart] found
        cdef RowPart part
        for numbers in listed:
            if len(numbers) != 3:
                raise ValueError(f"a part has a begin, an end and a place, got {len(numbers)} numbers")
            part.begin, part.end, part.at = numbers
            found.push_back(part)
        return found


class row_loops:  # a namespace: the module has loops of other systems too
    """The row loops; see asyncfabric._kernels.rows."""

    rows_at = RowMemory

    @staticmethod
    def take_rows(source, index, spans, targets) -> None:
        """Make the first rows of each target the rows index[begin:end] of the source, for its span."""
        cdef _RowExports held = _RowExports.__new__(_RowExports)
        cdef RowSource rows = held.rows_of(source)
        cdef const_ints taken = held.ints_of(index)
        cdef vector[GoingRows] going = held.going(spans, targets)
        cdef bint fine
        with nogil:
            fine = native_take_rows(rows, taken, const_going(going.data(), going.size()))
        if not fine:
            raise rows_refused("take_rows")

    @staticmethod
    def spread_rows(spans, sources, picked, pair_offsets, position, target) -> None:
        """Copy each row of the spans to the rows position[pair_offsets[row]:pair_offsets[row + 1]] of the target."""
        cdef _RowExports held = _RowExports.__new__(_RowExports)
        cdef vector[ComingRows] coming = held.coming(spans, sources, picked)
        cdef RowTarget out = held.rows_into(target)
        cdef const_ints offsets = held.ints_of(pair_offsets)
        cdef const_ints places = held.ints_of(position)
        cdef bint fine
        with nogil:
            fine = native_spread_rows(const_coming(coming.data(), coming.size()), offsets, places, out)
        if not fine:
            raise rows_refused("spread_rows")

    @staticmethod
    def weigh_rows(source, uint32_t kind, pair_offsets, position, weights, spans, targets) -> None:
        """Make each row of the spans the fp32 sum of weights[p] * source[position[p]] over its pairs, rounded once."""
        cdef _RowExports held = _RowExports.__new__(_RowExports)
        cdef RowSource rows = held.rows_of(source)
        cdef const_ints offsets = held.ints_of(pair_offsets)
        cdef const_ints places = held.ints_of(position)
        cdef const_floats factors = held.floats_of(weights, 1)
        cdef vector[GoingRows] going = held.going(spans, targets)
        cdef bint fine
        with nogil:
            fine = native_weigh_rows(rows, <RowKind> kind, offsets, places, factors,
                                     const_going(going.data(), going.size()))
        if not fine:
            raise rows_refused("weigh_rows")

    @staticmethod
    def add_rows(source, uint32_t kind, tokens, parts, target) -> None:
        """Make row t of the target the fp32 sum of the source rows that the parts have for token t, rounded once."""
        cdef _RowExports held = _RowExports.__new__(_RowExports)
        cdef RowSource rows = held.rows_of(source)
        cdef RowTarget out = held.rows_into(target)
        cdef const_ints listed = held.ints_of(tokens)
        cdef vector[RowPart] senders = held.parts(parts)
        cdef bint fine
        with nogil:
            fine = native_add_rows(rows, <RowKind> kind, listed, const_parts(senders.data(), senders.size()), out)
        if not fine:
            raise rows_refused("add_rows")

    @staticmethod
    def gather_sums(source, uint32_t kind, tokens, parts, sums) -> None:
        """Add to row t of the sums the source rows that the parts have for token t, in the order of parts."""
        cdef _RowExports held = _RowExports.__new__(_RowExports)
        cdef RowSource rows = held.rows_of(source)
        cdef const_ints listed = held.ints_of(tokens)
        cdef vector[RowPart] senders = held.parts(parts)
        cdef floats kept = held.floats_into(sums)
        cdef bint fine
        with nogil:
            fine = native_gather_sums(rows, <RowKind> kind, listed, const_parts(senders.data(), senders.size()), kept)
        if not fine:
            raise rows_refused("gather_sums")

    @staticmethod
    def count_pairs(experts, int32_t first, int64_t alignment, counts, begins, pair_offsets) -> int:
        """Count the pairs of rows and experts from `first` on; fills the last three, returns the number."""
        cdef _RowExports held = _RowExports.__new__(_RowExports)
        cdef size_t choices
        cdef const_experts listed = held.experts_of(experts, &choices)
        cdef ints numbers = held.ints_into(counts)
        cdef ints starts = held.ints_into(begins)
        cdef ints offsets = held.ints_into(pair_offsets)
        cdef int64_t pairs
        with nogil:
            pairs = native_count_pairs(listed, choices, first, alignment, numbers, starts, offsets)
        if pairs < 0:
            raise rows_refused("count_pairs")
        return pairs

    @staticmethod
    def place_pairs(experts, weights, int32_t first, begins, position, pair_weights, row_of, choice_of) -> None:
        """Give each pair its output row and its weight; experts begin at `begins`."""
        cdef _RowExports held = _RowExports.__new__(_RowExports)
        cdef size_t choices
        cdef const_experts listed = held.experts_of(experts, &choices)
        cdef const_floats factors = held.floats_of(weights)
        cdef const_ints starts = held.ints_of(begins)
        cdef RowPairs pairs
        pairs.position, pairs.weights = held.ints_into(position), held.floats_into(pair_weights, 1)
        pairs.row_of, pairs.choice_of = held.ints_into(row_of), held.ints_into(choice_of)
        cdef bint fine
        with nogil:
            fine = native_place_pairs(listed, factors, choices, first, starts, pairs)
        if not fine:
            raise rows_refused("place_pairs")

    @staticmethod
    def sums_kind() -> str:
        """Return which instructions the sums use: avx512, avx2 or plain."""
        return (<bytes> native_sums_kind()).decode("ascii")
