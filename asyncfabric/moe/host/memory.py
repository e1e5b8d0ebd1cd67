"""LaneMemory: the two regions of a lane, and arrays over their parts.

Runs on the event loop's thread. What lies where stands in LaneShape.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio
import numpy as np
import torch

from asyncfabric import Fabric, Region
from asyncfabric.moe.host.buffers import LaneShape
from asyncfabric.moe.host.record import Bytes

Slot = tuple[Bytes, Bytes]
"""The front, which a record ends, and the private rows behind it."""


class LaneSlots(NamedTuple):
    """The slots of all members, for one step in flight.

    Attributes:
        fronts: where their records end.
        private: their private rows.
    """

    fronts: list[Bytes]
    private: list[Bytes]

    @classmethod
    def of(cls, slots: Iterable[Slot]) -> LaneSlots:
        """Return the slots of the members, in their order."""
        fronts, private = zip(*slots, strict=True)
        return cls(list(fronts), list(private))


class ReceivingMemory:
    """Arrays over the receiving region of a member: the own one, or a peer's that this process has mapped.

    Attributes:
        rest: the area for rows that private slots do not hold, of each step in flight.
        back: the area for rows that come back, of each step in flight.
    """

    def __init__(self, shape: LaneShape, memory: memoryview) -> None:
        """Look at `shape.receive_bytes` bytes."""
        self._shape = shape
        found: Bytes = np.frombuffer(memory, dtype=np.uint8)
        self._rows = _rows_at(found, 0, shape.in_rows, shape.row_bytes)
        turns = range(shape.in_flight)
        self.rest: list[Bytes] = [
            _rows_at(found, shape.rest_offset(turn), shape.area_rows, shape.row_bytes) for turn in turns
        ]
        self.back: list[Bytes] = [
            _rows_at(found, shape.back_offset(turn), shape.back_rows, shape.back_row_bytes) for turn in turns
        ]

    def slot(self, turn: int, member: int) -> Slot:
        """Return the slot that a member sends to."""
        return _slot(self._shape, self._rows, self._shape.slot_row(turn, member))


class LaneMemory:
    """Receiving and staging memory of one member.

    Attributes:
        arriving: the slots that the members send to, of each step in flight.
        staged_rest, staged_back: staging memory for the rows of one pass.
        staged_rest_offset, staged_back_offset: where they begin in the staging region.
    """

    def __init__(self, shape: LaneShape, back_dtype: torch.dtype, receive: Region, staging: Region) -> None:
        """Look at two regions of `shape.receive_bytes` and `shape.staging_bytes`."""
        self.shape: LaneShape = shape
        self.receive: Region = receive
        self.staging: Region = staging
        self.incoming: ReceivingMemory = ReceivingMemory(shape, receive.memory)
        members = range(shape.members)
        self.arriving: list[LaneSlots] = [
            LaneSlots.of(self.incoming.slot(turn, member) for member in members) for turn in range(shape.in_flight)
        ]
        self.back_dtype: torch.dtype = back_dtype
        outgoing: Bytes = np.frombuffer(staging.memory, dtype=np.uint8)
        self._slots = _rows_at(outgoing, 0, shape.members * shape.slot_rows, shape.row_bytes)
        self.staged_rest_offset: int = shape.members * shape.slot_rows * shape.row_bytes
        self.staged_rest: Bytes = _rows_at(outgoing, self.staged_rest_offset, shape.area_rows, shape.row_bytes)
        self.staged_back_offset: int = self.staged_rest_offset + shape.area_rows * shape.row_bytes
        self.staged_back: Bytes = _rows_at(outgoing, self.staged_back_offset, shape.back_rows, shape.back_row_bytes)

    def staged_slot(self, member: int) -> Slot:
        """Return a member's slot in the staging region."""
        return _slot(self.shape, self._slots, self.staged_slot_row(member))

    def staged_slot_row(self, member: int) -> int:
        """Return the staging row at which the private rows for a member begin."""
        return member * self.shape.slot_rows + self.shape.front_rows


def _rows_at(memory: Bytes, offset: int, rows: int, width: int) -> Bytes:
    return memory[offset : offset + rows * width].reshape(rows, width)


def _slot(shape: LaneShape, rows: Bytes, first: int) -> Slot:
    """Return the slot whose private rows begin at row `first`."""
    return rows[first - shape.front_rows : first].reshape(-1), rows[first : first + shape.private]


@asynccontextmanager
async def open_memory(fabric: Fabric, shape: LaneShape, back_dtype: torch.dtype) -> AsyncIterator[LaneMemory]:
    """Allocate the two regions of a lane; released on leaving.

    Raises:
        DeviceError: no memory left.

    Cancellation: shielded while memory is released; then it goes on.
    """
    regions: list[Region] = []
    try:
        regions.append(await fabric.allocate(shape.receive_bytes, access="write"))
        regions.append(await fabric.allocate(shape.staging_bytes, access="local"))
        yield LaneMemory(shape, back_dtype, *regions)
    finally:
        with anyio.CancelScope(shield=True):
            for region in regions:
                await region.release()
