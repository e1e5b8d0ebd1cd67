# ordering.pxi: putting boxes of weights in order and summing them in one pass, over numpy arrays, without the GIL.


class ordering:  # a namespace
    """See asyncfabric._kernels.ordering."""

    @staticmethod
    def order_and_sum(const unsigned char[::1] memory, int64_t at, const int64_t[::1] sizes, const int64_t[::1] strides,
                      size_t run_bytes, unsigned char[::1] target, bint past) -> int:
        """Copy runs behind each other into the target; return the XXH3 (64 bits) of them. `past` the caches, or not."""
        cdef OrderRuns runs
        cdef size_t bytes = 0, reach = 0
        cdef uint64_t found = 0
        cdef ordered_bytes out = ordered_bytes(&target[0] if target.shape[0] else NULL, target.shape[0])
        cdef bint fine
        runs.sizes = ints_of(sizes)
        runs.strides = ints_of(strides)
        runs.run_bytes = run_bytes
        fine = runs.measure(&bytes, &reach)
        if not fine or at < 0 or at > memory.shape[0] or reach > <size_t> (memory.shape[0] - at):
            raise IndexError(f"order_and_sum: runs of {run_bytes} bytes from byte {at} leave {memory.shape[0]} bytes")
        runs.data = &memory[0] + at
        with nogil:
            fine = native_order_and_sum(runs, out, past, &found)
        if not fine:
            raise IndexError(f"order_and_sum: {bytes} bytes do not fit a target of {target.shape[0]}, or are too few")
        return found
