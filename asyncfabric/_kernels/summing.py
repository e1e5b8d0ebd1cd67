"""What compiled checksums of weights take and give. Types only, made by cython_ext/summing.pxi."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class BoxSums(Protocol):
    """A table of boxes, made once; some of them are summed each time, and the GIL is released meanwhile."""

    def sum(self, memory: NDArray[np.uint8], numbers: Ints, sums: NDArray[np.uint64]) -> None:
        """Write into `sums` the XXH3 (64 bits) of each box of `numbers`, as it lies in a memory.

        Raises IndexError, before anything is read, when boxes leave the memory, a number is none of the table's, or
        there are not as many sums.
        """


class MakeBoxSums(Protocol):
    """Makes such a table."""

    def __call__(
        self, stretches: Ints, at: Ints, run_bytes: Ints, dimensions: Ints, sizes: Ints, strides: Ints
    ) -> BoxSums:
        """Take boxes: stretches one after the other, each of runs of equal length.

        Args:
            stretches: by box, where its stretches begin, and behind the last box where they end.
            at: by stretch, its first byte.
            run_bytes: by stretch.
            dimensions: by stretch, where its `sizes` and `strides` begin, as `stretches`.
            sizes: of the dimensions from run to run, outermost first.
            strides: of them, in bytes.

        Raises ValueError when columns do not fit each other, or a box has fewer than LEAST_SUMMED_BYTES.
        """


class SumWords(Protocol):
    """Works out the sum behind the checksum "words"."""

    def __call__(self, data: NDArray[np.uint8], place: int, /) -> int:
        """Return the sum over words of 32 bits of contiguous bytes; sums of parts add up to that of the whole.

        The last word is filled up by zeros. The GIL is released meanwhile.

        Args:
            data: the bytes.
            place: number of the first word.
        """
