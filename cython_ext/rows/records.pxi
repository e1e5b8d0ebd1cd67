# records.pxi: the records that open a step of asyncfabric.moe, and the routes that they are about, over numpy arrays
# with the GIL released. What a record holds is checked below, in native/src/rows/records.cc.


class record_loops:  # a namespace, as row_loops
    """Routes and records; see asyncfabric._kernels.records."""

    @staticmethod
    def plan_route(const int32_t[:, ::1] experts, const int64_t[::1] owner, int64_t[::1] tokens,
                   int64_t[::1] offsets) -> int:
        """List the tokens of each member; returns how many entries of `tokens` are used."""
        cdef const_experts listed = experts_of(experts)
        cdef size_t choices = experts.shape[1]
        cdef const_ints owners = ints_of(owner)
        cdef ints found = ints_into(tokens)
        cdef ints begins = ints_into(offsets)
        cdef int64_t used
        with nogil:
            used = native_plan_route(listed, choices, owners, found, begins)
        if used < 0:
            raise rows_refused("plan_route")
        return used

    @staticmethod
    def write_records(fronts, uint32_t sender, uint64_t step, const int32_t[::1] origins, const int32_t[:, ::1] experts,
                      const float[:, ::1] weights, const float[:, ::1] scales, const int64_t[::1] owner,
                      const int64_t[::1] tokens, const int64_t[::1] offsets) -> None:
        """Write the record for each member to the end of its front."""
        cdef _RowExports held = _RowExports.__new__(_RowExports)
        cdef vector[RowFront] each = held.fronts(fronts, PyBUF_WRITABLE)
        cdef RowsAbout about
        about.origins = const_experts(&origins[0] if origins.shape[0] else NULL, origins.shape[0])
        about.experts, about.choices = experts_of(experts), experts.shape[1]
        about.weights, about.scales, about.scales_of_row = floats_of(weights), floats_of(scales), scales.shape[1]
        cdef const_ints owners = ints_of(owner)
        cdef const_ints listed = ints_of(tokens)
        cdef const_ints begins = ints_of(offsets)
        cdef bint fine
        with nogil:
            fine = native_write_records(const_fronts(each.data(), each.size()), sender, step, about, owners, listed,
                                        begins)
        if not fine:
            raise rows_refused("write_records")

    @staticmethod
    def read_heads(fronts, uint32_t reader, uint64_t step, uint64_t max_tokens, int64_t[:, ::1] counts,
                   int64_t[::1] offsets):
        """Read what the heads of all members announce; returns None, or the first that is refused."""
        cdef _RowExports held = _RowExports.__new__(_RowExports)
        cdef vector[RowFront] each = held.fronts(fronts, PyBUF_SIMPLE)
        cdef size_t numbers = counts.shape[0] * counts.shape[1]
        cdef ints announced = ints(&counts[0, 0] if numbers else NULL, numbers)
        cdef ints begins = ints_into(offsets)
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
    def read_rows(fronts, const int64_t[::1] offsets, int32_t[::1] origins, int32_t[:, ::1] experts,
                  float[:, ::1] weights, float[:, ::1] scales) -> None:
        """Copy what the rows of all members are about; offsets as `read_heads` made them."""
        cdef _RowExports held = _RowExports.__new__(_RowExports)
        cdef vector[RowFront] each = held.fronts(fronts, PyBUF_SIMPLE)
        cdef size_t count = experts.shape[0] * experts.shape[1]
        cdef RowsReadAbout into
        into.origins = experts_span(&origins[0] if origins.shape[0] else NULL, origins.shape[0])
        into.experts, into.choices = experts_span(&experts[0, 0] if count else NULL, count), experts.shape[1]
        into.weights, into.scales, into.scales_of_row = floats_into(weights), floats_into(scales), scales.shape[1]
        cdef const_ints begins = ints_of(offsets)
        cdef bint fine
        with nogil:
            fine = native_read_rows(const_fronts(each.data(), each.size()), begins, into)
        if not fine:
            raise rows_refused("read_rows")
