# records.pxi: the records that open a step of asyncfabric.moe, and the routes that they are about, over numpy arrays
# with the GIL released. What a record holds is checked below, in native/src/rows/records.cc.

ctypedef fused expert_number:
    int32_t
    int64_t


cdef range_in(const expert_number* numbers, Py_ssize_t count):
    cdef Py_ssize_t i
    cdef expert_number low = numbers[0] if count else 0
    cdef expert_number high = low
    for i in range(count):
        low, high = min(low, numbers[i]), max(high, numbers[i])
    return low, high


class record_loops:  # a namespace, as row_loops
    """Routes and records; see asyncfabric._kernels.records."""

    @staticmethod
    def range_of(experts):
        """Return the least and the largest number; (0, 0) where there is none."""
        cdef _RowExports held = _RowExports.__new__(_RowExports)
        cdef Py_buffer view = held.hold(experts, PyBUF_SIMPLE, 8 if experts.itemsize == 8 else 4, 2)
        if view.itemsize == 8:
            return range_in(<const int64_t*> view.buf, view.len // 8)
        return range_in(<const int32_t*> view.buf, view.len // 4)

    @staticmethod
    def plan_route(experts, owner, tokens, offsets) -> int:
        """List the tokens of each member; returns how many entries of `tokens` are used."""
        cdef _RowExports held = _RowExports.__new__(_RowExports)
        cdef size_t choices
        cdef const_experts listed = held.experts_of(experts, &choices)
        cdef const_ints owners = held.ints_of(owner)
        cdef ints found = held.ints_into(tokens)
        cdef ints begins = held.ints_into(offsets)
        cdef int64_t used
        with nogil:
            used = native_plan_route(listed, choices, owners, found, begins)
        if used < 0:
            raise rows_refused("plan_route")
        return used

    @staticmethod
    def write_records(fronts, uint32_t sender, uint64_t step, origins, experts, weights, scales, owner, tokens,
                      offsets) -> None:
        """Write the record for each member to the end of its front."""
        cdef _RowExports held = _RowExports.__new__(_RowExports)
        cdef vector[RowFront] each = held.fronts(fronts, PyBUF_WRITABLE)
        cdef Py_buffer rows = held.hold(origins, PyBUF_SIMPLE, 4, 1)
        cdef Py_buffer factors = held.hold(scales, PyBUF_SIMPLE, 4, 2)
        cdef RowsAbout about
        about.origins = const_experts(<const int32_t*> rows.buf, rows.shape[0])
        about.experts, about.weights = held.experts_of(experts, &about.choices), held.floats_of(weights)
        about.scales, about.scales_of_row = const_floats(<const float*> factors.buf, factors.len // 4), factors.shape[1]
        cdef const_ints owners = held.ints_of(owner)
        cdef const_ints listed = held.ints_of(tokens)
        cdef const_ints begins = held.ints_of(offsets)
        cdef bint fine
        with nogil:
            fine = native_write_records(const_fronts(each.data(), each.size()), sender, step, about, owners, listed,
                                        begins)
        if not fine:
            raise rows_refused("write_records")

    @staticmethod
    def read_heads(fronts, uint32_t reader, uint64_t step, uint64_t max_tokens, counts, offsets):
        """Read what the heads of all members announce; returns None, or the first that is refused."""
        cdef _RowExports held = _RowExports.__new__(_RowExports)
        cdef vector[RowFront] each = held.fronts(fronts, PyBUF_SIMPLE)
        cdef ints announced = held.ints_into(counts, 2)
        cdef ints begins = held.ints_into(offsets)
        cdef HeadCheck found
        with nogil:
            found = native_read_heads(const_fronts(each.data(), each.size()), reader, step, max_tokens, announced,
                                      begins)
        if found.verdict == HeadVerdict.kMisuse:
            raise rows_refused("read_heads")
        if found.verdict == HeadVerdict.kFine:
            return None
        head = found.head
        return (found.verdict == HeadVerdict.kOtherRecord, found.member, head.magic, head.member, head.members,
                head.step, head.rows)

    @staticmethod
    def read_rows(fronts, offsets, origins, experts, weights, scales) -> None:
        """Copy what the rows of all members are about; offsets as `read_heads` made them."""
        cdef _RowExports held = _RowExports.__new__(_RowExports)
        cdef vector[RowFront] each = held.fronts(fronts, PyBUF_SIMPLE)
        cdef Py_buffer rows = held.hold(origins, PyBUF_WRITABLE, 4, 1)
        cdef Py_buffer choices = held.hold(experts, PyBUF_WRITABLE, 4, 2)
        cdef Py_buffer factors = held.hold(scales, PyBUF_WRITABLE, 4, 2)
        cdef RowsReadAbout into
        into.origins = experts_span(<int32_t*> rows.buf, rows.shape[0])
        into.experts, into.choices = experts_span(<int32_t*> choices.buf, choices.len // 4), choices.shape[1]
        into.scales, into.scales_of_row = floats(<float*> factors.buf, factors.len // 4), factors.shape[1]
        into.weights = held.floats_into(weights)
        cdef const_ints begins = held.ints_of(offsets)
        cdef bint fine
        with nogil:
            fine = native_read_rows(const_fronts(each.data(), each.size()), begins, into)
        if not fine:
            raise rows_refused("read_rows")
