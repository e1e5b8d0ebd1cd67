"""Scratch: how the bound on a trainer's extra memory is shared out, and the staging memory that is its largest part."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

from asyncfabric import Fabric
from asyncfabric.weights.update.device import Device
from asyncfabric.weights.update.pipeline import PAGES_IN_FLIGHT
from asyncfabric.weights.update.program import Program
from asyncfabric.weights.update.staging import Staging, padded
from asyncfabric.weights.update.tiles import TILE_BYTES

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

    staging: Staging | None
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
        ValueError: too little for the largest box; the text says how much is needed.
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
        yield Scratch(Staging(region), unit, reserve)
    finally:
        with anyio.CancelScope(shield=True):
            await region.release()
