"""What the compiled pass over boxes of weights takes and gives. Types only, made by cython_ext/summing.pxi."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

LEAST_SUMMED_BYTES = 241
"""Fewer bytes have formulas of their own in XXH3, which it does not know (kLeastSummedBytes)."""


class Ordering(Protocol):
    """Putting runs in order; the GIL is released meanwhile."""

    def order_and_sum(
        self,
        memory: NDArray[np.uint8],
        at: int,
        sizes: NDArray[np.int64],
        strides: NDArray[np.int64],
        run_bytes: int,
        target: NDArray[np.uint8],
        past: bool,
    ) -> int:
        """Copy runs of a memory, from byte `at` on, behind each other into the target; return their XXH3 (64 bits).

        `sizes` and `strides`, in bytes, are of the dimensions from run to run, outermost first. With `past` the target
        is written past the caches. Raises IndexError, before anything is written, when runs leave the memory, or the
        target has other than their bytes or fewer than LEAST_SUMMED_BYTES.
        """
