# summing.pxi: checksums of boxes of weights over numpy arrays, without the GIL: of one that is put in order in the same
# pass, and of many where they lie, by a table made once; and the sum of words.


cdef const_ints ints_of(const int64_t[::1] numbers):
    return const_ints(&numbers[0] if numbers.shape[0] else NULL, numbers.shape[0])


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


cdef class BoxSums:
    """See asyncfabric._kernels.summing."""

    cdef NativeBoxTable table
    cdef tuple columns  # are looked at as long as this lives
    cdef size_t memory_bytes

    def __init__(self, stretches, at, run_bytes, dimensions, sizes, strides) -> None:
        self.columns = (stretches, at, run_bytes, dimensions, sizes, strides)
        self.table.stretches = ints_of(stretches)
        self.table.at = ints_of(at)
        self.table.run_bytes = ints_of(run_bytes)
        self.table.dimensions = ints_of(dimensions)
        self.table.sizes = ints_of(sizes)
        self.table.strides = ints_of(strides)
        if not self.table.measure(&self.memory_bytes):
            raise ValueError("BoxSums: columns do not fit each other, or a box is too small")

    def sum(self, const unsigned char[::1] memory, const int64_t[::1] numbers, uint64_t[::1] sums) -> None:
        """Work out the XXH3 (64 bits) of these boxes of a memory."""
        cdef const_ints wanted = ints_of(numbers)
        cdef found_sums out = found_sums(&sums[0] if sums.shape[0] else NULL, sums.shape[0])
        cdef bint fine = <size_t> memory.shape[0] >= self.memory_bytes
        if self.memory_bytes == 0:  # no box at all
            fine = numbers.shape[0] == 0 and sums.shape[0] == 0
        elif fine:
            with nogil:
                fine = native_sum_boxes(&memory[0], self.table, wanted, out)
        if not fine:
            raise IndexError(f"BoxSums: boxes reach to byte {self.memory_bytes} of {memory.shape[0]}, or a number is "
                             f"none of {len(self.columns[0]) - 1}, or there is not a sum for each")


def sum_words(const unsigned char[::1] data, place) -> int:
    """See asyncfabric._kernels.summing."""
    cdef summed_bytes given = summed_bytes(&data[0] if data.shape[0] else NULL, data.shape[0])
    cdef uint32_t first = place & 0xffffffff
    cdef uint64_t found = 0
    with nogil:
        found = native_sum_words(given, first)
    return found
