"""Scratch: how the bound on a trainer's extra memory is shared out; the staging memory, its largest part, as a ring.

Runs on the event loop's thread. Places of the ring are taken one behind the other, and are free for others once those
that were taken before are given back too; a task that finds no room waits. Its length is the hard bound: nothing is
staged elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

from asyncfabric import Fabric, Region
from asyncfabric._notice import Notice
from asyncfabric.weights.memory.device import Device
from asyncfabric.weights.memory.rows import padded
from asyncfabric.weights.memory.tiles import TILE_BYTES
from asyncfabric.weights.sender.program import Program
from asyncfabric.weights.writing import MOST_PAGES


class ScratchStaging:
    """A ring over a region.

    Attributes:
        region: where the places are.
        highest_bytes: the most that was taken at once.
    """

    def __init__(self, region: Region) -> None:
        """Take the whole region."""
        self.region: Region = region
        self.highest_bytes: int = 0
        self._places: deque[tuple[int, int]] = deque()  # (begin, end) in order, none of them empty
        self._given: set[int] = set()  # where those begin that are back before earlier ones
        self._freed = Notice()

    @property
    def taken_bytes(self) -> int:
        """What is taken now."""
        return sum(end - begin for begin, end in self._places)

    async def take(self, length_bytes: int) -> int:
        """Return where `length_bytes` may be staged, once there is room.

        Raises ValueError for more than the region has.

        Cancellation: nothing was taken.
        """
        length = padded(length_bytes)
        if length > self.region.length:
            raise ValueError(f"{length_bytes} bytes cannot be staged in {self.region.length}: give more scratch_bytes")
        while (at := self._room(length)) is None:
            await self._freed.wait()
        self._places.append((at, at + length))
        self.highest_bytes = max(self.highest_bytes, self.taken_bytes)
        return at

    def give_back(self, at: int) -> None:
        """Give back the place that begins there."""
        self._given.add(at)
        while self._places and self._places[0][0] in self._given:
            self._given.remove(self._places.popleft()[0])
            self._freed.notify()

    def clear(self) -> None:
        """Give back everything; nothing reads or writes it any more."""
        while self._places:
            self.give_back(self._places[0][0])

    def _room(self, length: int) -> int | None:
        if not self._places:
            return 0
        first, last = self._places[0][0], self._places[-1][1]
        if last > first:
            if last + length <= self.region.length:
                return last
            return 0 if length <= first else None
        return last if last + length <= first else None


PAGES_IN_FLIGHT = 8 * MOST_PAGES
"""Pages whose writes have not ended, give or take one call: 16 bytes each in the engine."""

PAGE_ENTRY_BYTES = 32
"""Of a page that is posted: source and target, here and in the engine's copy."""

UNITS_STAGED = 3
"""Units that the staging memory holds besides those that are filled side by side: one waiting, two written."""

LEAST_QUEUED_STAGED, QUEUED_STAGED = 4, 6
"""All that it holds where the device queues, and if scratch allows: some room is lost at the end of the ring, and
nothing may wait for room."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """The shares.

    Attributes:
        staging: None when nothing is converted.
        unit_bytes: boxes go through the pipeline together up to this.
        reserve_bytes: for tiles, gathered boxes, page lists.
    """

    staging: ScratchStaging | None
    unit_bytes: int
    reserve_bytes: int

    def serves(self, program: Program) -> bool:
        """Whether it is enough for another program."""
        length = self.staging.region.length if self.staging is not None else 0
        return program.largest_staged <= length and self.reserve_bytes >= reserve_of(program)


def reserve_of(program: Program) -> int:
    """Return the bytes of everything that is not staged: tiles, one box that is gathered or brought, page lists."""
    return TILE_BYTES + 2 * program.largest_box + PAGES_IN_FLIGHT * PAGE_ENTRY_BYTES


@asynccontextmanager
async def open_scratch(fabric: Fabric, program: Program, scratch_bytes: int, device: Device) -> AsyncIterator[Scratch]:
    """Allocate the staging memory on the device of the shards; released on leaving.

    Raises:
        ValueError: too little for the largest box; the text states how much is needed.
        DeviceError: no memory left.

    Cancellation: shielded while memory is released; then it goes on.
    """
    reserve = reserve_of(program)
    room = scratch_bytes - reserve
    if room < program.largest_staged:
        raise ValueError(
            f"scratch_bytes is {scratch_bytes}; the largest piece stages {program.largest_staged} bytes and working "
            f"on it takes {reserve}: give at least {reserve + program.largest_staged}, or plan smaller chunk_bytes"
        )
    if not program.largest_staged:
        yield Scratch(None, device.unit_bytes, reserve)
        return
    everything = sum(box.staged_bytes for box in program.boxes)
    least = held = UNITS_STAGED + device.fills
    if device.queues:
        least, held = LEAST_QUEUED_STAGED, QUEUED_STAGED
    unit = max(program.largest_staged, min(device.unit_bytes, room // least))
    length = max(program.largest_staged, min(room, everything, held * unit))
    region = await fabric.allocate(padded(length), device=device.name, access="local")
    try:
        yield Scratch(ScratchStaging(region), unit, reserve)
    finally:
        with anyio.CancelScope(shield=True):
            await region.release()
