"""Shelf: memory of the rows that are handed out, used again once nobody holds them. Fresh pages cost more than a copy.

Runs on the event loop's thread. Users keep tensors as long as they like: memory comes back when the last view of it is
gone, never earlier, and what is not on the shelf by then is freed as any other memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import ref

import numpy as np

from asyncfabric.moe.host.record import Bytes

ALIGNMENT = 64
"""Rows begin at cache lines, so that they can be written past the caches."""
SPARE = 1.125
"""Memory is taken a little larger than asked for: the next step has a few rows more."""
LEAST_BYTES = 1 << 20
"""Below this the allocator has warm memory anyway."""
MOST_BYTES = 128 << 20
"""Above this memory is not kept: what one unlucky step needed must not stay."""


@dataclass(slots=True, eq=False)  # a place is itself: arrays in it have no truth value to compare by
class _Place:
    memory: memoryview
    holder: ref[Bytes] | ref[memoryview]


class Shelf:
    """A few pieces of memory."""

    def __init__(self, places: int) -> None:
        """Keep at most so many pieces."""
        self._most = places
        self._places: list[_Place] = []

    @property
    def kept_bytes(self) -> int:
        """Bytes of what is on the shelf, held by somebody or not."""
        return sum(len(place.memory) for place in self._places)

    def rows(self, count: int, width: int) -> Bytes:
        """Return memory for rows, shape [count, width]; whatever it held before is still in it."""
        length = count * width
        if not LEAST_BYTES <= length <= MOST_BYTES:
            return np.empty((count, width), dtype=np.uint8)
        place = self._free(length)
        if place is None:
            return _handed(_memory(length), length).reshape(count, width)
        array = _handed(place.memory, length)
        place.holder = ref(array)
        return array.reshape(count, width)

    def _free(self, length: int) -> _Place | None:
        """Return a place with room that nobody holds, a new one where there may be one more, or None."""
        free = [place for place in self._places if place.holder() is None]
        for place in free:
            if len(place.memory) >= length:
                return place
        if len(self._places) >= self._most:
            if not free:
                return None
            self._places.remove(free[0])  # too small by now
        memory = _memory(int(length * SPARE))
        self._places.append(_Place(memory, ref(memory)))
        return self._places[-1]


def _memory(length: int) -> memoryview:
    memory: Bytes = np.empty(length + ALIGNMENT, dtype=np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory.data[begin : begin + length]


def _handed(memory: memoryview, length: int) -> Bytes:
    """Return an array of its own over the beginning: numpy lets views refer to it and not to `memory` behind it."""
    return np.frombuffer(memory, np.uint8, length)
