"""RangeTable: which registration covers each of many blocks, without a Python step per block.

Immutable, any thread; made anew when registrations change.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from asyncfabric.integrations.nixl.blocks import Blocks, Column
from asyncfabric.integrations.nixl.kinds import nixl_mem_t

_FIRST = np.zeros(1, dtype=np.int64)

Owner = TypeVar("Owner")
FoundOwner = TypeVar("FoundOwner", covariant=True)


class Place(NamedTuple):
    """Where registered memory is; also of host memory the device counts, as with NIXL."""

    memory: nixl_mem_t
    device: int
    start: int
    length: int

    @property
    def room(self) -> tuple[nixl_mem_t, int]:
        """What addresses count in."""
        return self.memory, self.device


class Found(NamedTuple, Generic[FoundOwner]):
    """Blocks in their registrations: the owners that occur, which one each block has, and its offset therein."""

    owners: tuple[FoundOwner, ...]
    which: Column
    offsets: Column


class NotCoveredError(LookupError):
    """A block that no registration covers.

    Attributes:
        position: of the first such block.
    """

    def __init__(self, position: int, text: str) -> None:
        super().__init__(text)
        self.position = position


class RangeTable(Generic[Owner]):
    """Registrations by their addresses; they may overlap, and then any that covers a block will do."""

    def __init__(self, entries: Iterable[tuple[Place, Owner]]) -> None:
        rooms: dict[tuple[nixl_mem_t, int], list[tuple[int, int, Owner]]] = {}
        for place, owner in entries:
            rooms.setdefault(place.room, []).append((place.start, place.start + place.length, owner))
        self._rooms: dict[tuple[nixl_mem_t, int], tuple[Column, Column, Column, tuple[Owner, ...]]] = {}
        for room, rows in rooms.items():
            rows.sort(key=lambda row: row[:2])
            starts = np.array([row[0] for row in rows], dtype=np.int64)
            ends = np.array([row[1] for row in rows], dtype=np.int64)
            self._rooms[room] = starts, ends, np.maximum.accumulate(ends), tuple(row[2] for row in rows)

    def find(self, blocks: Blocks) -> Found[Owner]:
        """Return the registration of each block; an empty one needs none, whatever address it names.

        Raises:
            NotCoveredError: a block lies in none; it names the first.
        """
        if not blocks.lengths.all():
            return self._find_others(blocks)
        if not len(blocks):
            return Found((), blocks.addresses, blocks.addresses)
        devices = blocks.devices
        if len(devices) == 1:
            return self._find_one((blocks.memory, int(devices[0])), blocks)
        if bool((devices == devices[0]).all()):
            return self._find_in((blocks.memory, int(devices[0])), blocks)
        owners: list[Owner] = []
        which, offsets = np.empty_like(devices), np.empty_like(devices)
        for device in np.unique(devices):
            rows = np.flatnonzero(devices == device)
            part = Blocks(blocks.memory, blocks.addresses[rows], blocks.lengths[rows], devices[rows])
            try:
                found = self._find_in((blocks.memory, int(device)), part)
            except NotCoveredError as missing:
                raise NotCoveredError(int(rows[missing.position]), str(missing)) from None
            which[rows] = found.which + len(owners)
            offsets[rows] = found.offsets
            owners.extend(found.owners)
        return Found(tuple(owners), which, offsets)

    def _find_others(self, blocks: Blocks) -> Found[Owner]:
        """Look up those that are not empty; the rows of the empty ones mean nothing."""
        rows = np.flatnonzero(blocks.lengths)
        columns = (blocks.addresses[rows], blocks.lengths[rows], blocks.devices[rows])
        try:
            found = self.find(Blocks(blocks.memory, *columns))
        except NotCoveredError as missing:
            raise NotCoveredError(int(rows[missing.position]), str(missing)) from None
        which, offsets = np.zeros_like(blocks.lengths), np.zeros_like(blocks.lengths)
        which[rows], offsets[rows] = found.which, found.offsets
        return Found(found.owners, which, offsets)

    def _find_one(self, room: tuple[nixl_mem_t, int], blocks: Blocks) -> Found[Owner]:
        """Look one block up, without arrays: many transfers are of one block."""
        begin = int(blocks.addresses[0])
        end = begin + int(blocks.lengths[0])
        if room in self._rooms:
            starts, ends, reach, owners = self._rooms[room]
            at = bisect_right(starts, begin) - 1
            while at >= 0 and reach[at] >= end:
                if ends[at] >= end:
                    return Found((owners[at],), _FIRST, blocks.addresses - starts[at])
                at -= 1
        raise NotCoveredError(0, _uncovered(blocks, 0))

    def _find_in(self, room: tuple[nixl_mem_t, int], blocks: Blocks) -> Found[Owner]:
        if room not in self._rooms:
            raise NotCoveredError(0, _uncovered(blocks, 0))
        starts, ends, reach, owners = self._rooms[room]
        last = blocks.addresses + blocks.lengths
        index = np.searchsorted(starts, blocks.addresses, side="right") - 1
        open_rows = np.flatnonzero((index < 0) | (ends[index] < last))
        while len(open_rows):  # an earlier registration may reach further
            at = index[open_rows]
            hopeless = (at < 0) | (reach[at] < last[open_rows])
            if hopeless.any():
                position = int(open_rows[np.flatnonzero(hopeless)[0]])
                raise NotCoveredError(position, _uncovered(blocks, position))
            index[open_rows] = at - 1
            open_rows = open_rows[(at == 0) | (ends[at - 1] < last[open_rows])]
        used, which = (index[:1], np.zeros_like(index)) if (index == index[0]).all() else _used(index)
        return Found(tuple(owners[int(one)] for one in used), which, blocks.addresses - starts[index])


def _used(index: Column) -> tuple[Column, Column]:
    used, which = np.unique(index, return_inverse=True)
    return used, which.astype(np.int64, copy=False)


def _uncovered(blocks: Blocks, position: int) -> str:
    address, length = int(blocks.addresses[position]), int(blocks.lengths[position])
    where = f"{blocks.memory.name} of device {int(blocks.devices[position])}"
    return f"{length} bytes at {address:#x} in {where} lie in no registered memory"
