"""Putting boxes in order and summing them in one pass over memory, compiled. On worker threads; lets go of the GIL.

A pass over a GiB takes as long as reading it from memory, so boxes are read once: numpy and a checksum behind it read
and write them three times.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from asyncfabric._bridge.native import native_ordering
from asyncfabric._bridge.ordering import LEAST_SUMMED_BYTES, Ordering
from asyncfabric.weights.boxes import Ints
from asyncfabric.weights.update.rows import Bytes, Strided

LEAST_RUN_BYTES = 256
"""Shorter runs cost a call each: numpy exchanges dimensions quicker."""

MOST_DIMENSIONS = 8
"""From run to run."""

_ordering = cache(native_ordering)


def orders(lies: Strided) -> bool:
    """Return whether a box can be put in order so."""
    keep = lies.outer_dimensions(lies.run_bytes)
    return lies.run_bytes >= LEAST_RUN_BYTES and lies.nbytes >= LEAST_SUMMED_BYTES and keep <= MOST_DIMENSIONS


def order_and_sum(lies: Strided, memory: Bytes, at: int, out: Bytes, past: bool) -> int | None:
    """Put a box that `orders` says yes to in order, into contiguous memory; return the XXH3 of it.

    With `past` it is written past the caches, for memory that is read much later. None: nothing was compiled, and
    nothing was done.

    Raises IndexError when the box leaves its memory or does not fit.
    """
    loops: Ordering | None = _ordering()
    if loops is None:
        return None
    keep = lies.outer_dimensions(lies.run_bytes)
    return loops.order_and_sum(
        memory, at, _ints(lies.sizes[:keep]), _ints(lies.strides[:keep]), lies.run_bytes, out, past
    )


def _ints(values: tuple[int, ...]) -> Ints:
    return np.array(values, np.int64)
