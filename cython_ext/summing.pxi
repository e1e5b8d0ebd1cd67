# summing.pxi: checksums of many boxes of weights in one call, over numpy arrays, without the GIL.


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
