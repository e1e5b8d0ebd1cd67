"""BoxTable: checksums of boxes that always lie in the same places: told once, any of them summed in one compiled call.

A row costs a receiver more in calls than in bytes when it is small, and many runs were copied by numpy before they were
hashed. On worker threads; the compiled call lets go of the GIL.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate

import numpy as np

from asyncfabric._bridge.native import native_box_sums
from asyncfabric._bridge.ordering import LEAST_SUMMED_BYTES
from asyncfabric.weights.commit.checksums import checksum
from asyncfabric.weights.update.ordering import MOST_DIMENSIONS
from asyncfabric.weights.update.rows import Bytes, Strided

Box = Sequence[tuple[Strided, int]]
"""How its stretches lie, one after the other, and from which byte of a memory on."""

LEAST_RUN_BYTES = 64
"""Shorter runs go through the compiled call one by one: numpy puts them in order quicker."""

_make = cache(native_box_sums)


class BoxTable:
    """Boxes of one memory."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        """Take the boxes; where nothing was compiled, and for those that the compiled call does not take, is Python."""
        make = _make()
        known = [number for number, box in enumerate(boxes) if make is not None and _taken(box)]
        self._others = {number: boxes[number] for number in set(range(len(boxes))).difference(known)}
        self._place = np.full(len(boxes), -1, np.int64)
        self._place[known] = np.arange(len(known))
        if make is None:
            return
        stretches = [one for number in known for one in boxes[number]]
        outer = [lies.outer_dimensions(lies.run_bytes) for lies, _ in stretches]
        self._sums = make(
            _begins(len(boxes[number]) for number in known),
            np.array([at for _, at in stretches], np.int64),
            np.array([lies.run_bytes for lies, _ in stretches], np.int64),
            _begins(outer),
            np.array(
                [size for (lies, _), keep in zip(stretches, outer, strict=True) for size in lies.sizes[:keep]], np.int64
            ),
            np.array(
                [step for (lies, _), keep in zip(stretches, outer, strict=True) for step in lies.strides[:keep]],
                np.int64,
            ),
        )

    def sums(self, memory: Bytes, numbers: Sequence[int]) -> list[int]:
        """Return the XXH3 (64 bits) of some of the boxes.

        Raises IndexError when a box leaves the memory.
        """
        wanted = np.asarray(numbers, np.int64)
        places = self._place[wanted]
        inside = places >= 0
        found = np.zeros(len(wanted), np.uint64)
        if inside.any():
            compiled = np.empty(int(inside.sum()), np.uint64)
            self._sums.sum(memory, places[inside], compiled)
            found[inside] = compiled
        for index in np.flatnonzero(~inside).tolist():
            box = self._others[int(wanted[index])]
            found[index] = checksum(part for lies, at in box for part in lies.parts(memory, at))
        return found.tolist()


def _taken(box: Box) -> bool:
    return sum(lies.nbytes for lies, _ in box) >= LEAST_SUMMED_BYTES and all(
        lies.run_bytes >= LEAST_RUN_BYTES and lies.outer_dimensions(lies.run_bytes) <= MOST_DIMENSIONS
        for lies, _ in box
    )


def _begins(counts: Iterable[int]) -> np.ndarray:
    return np.array([0, *accumulate(counts)], np.int64)
