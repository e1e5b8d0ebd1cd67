"""LaneMemory: the two regions of a lane, and arrays over their parts.

Runs on the event loop's thread. What lies where stands in LaneShape.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio
import numpy as np
import torch

from asyncfabric import Fabric, Region
from asyncfabric.moe.host.buffers import LaneShape
from asyncfabric.moe.host.record import Bytes


class ReceivingMemory:
    """Arrays over the receiving region of a member: the own one, or a peer's that this process has mapped.

    Attributes:
        rows: all rows before the areas for what comes back.
        back: the area for what comes back, of each step in flight.
    """

    def __init__(self, shape: LaneShape, memory: memoryview) -> None:
        """Look at `shape.receive_bytes` bytes."""
        self._shape = shape
        found = np.frombuffer(memory, dtype=np.uint8)
        self.rows: Bytes = found[: shape.in_rows * shape.row_bytes].reshape(-1, shape.row_bytes)
        starts = [shape.back_offset(turn) for turn in range(shape.in_flight)]
        length = shape.back_rows * shape.back_row_bytes
        self.back: list[Bytes] = [found[at : at + length].reshape(shape.back_rows, -1) for at in starts]

    def front(self, turn: int, member: int) -> Bytes:
        """Return the front of the slot that a member sends to."""
        end = self._shape.slot_row(turn, member)
        return self.rows[end - self._shape.front_rows : end].reshape(-1)

    def private(self, turn: int, member: int) -> Bytes:
        """Return the private rows of the slot that a member sends to."""
        begin = self._shape.slot_row(turn, member)
        return self.rows[begin : begin + self._shape.private]


class LaneSlots(NamedTuple):
    """LaneSlots of all members, for one step in flight.

    Attributes:
        fronts: where their records end.
        private: their private rows.
    """

    fronts: list[Bytes]
    private: list[Bytes]


class LaneMemory:
    """Receiving and staging memory of one member.

    Attributes:
        arriving: the slots that the members send to, of each step in flight.
    """

    def __init__(self, shape: LaneShape, back_dtype: torch.dtype, receive: Region, staging: Region) -> None:
        """Look at two regions of `shape.receive_bytes` and `shape.staging_bytes`."""
        self.shape: LaneShape = shape
        self.receive: Region = receive
        self.staging: Region = staging
        self.incoming: ReceivingMemory = ReceivingMemory(shape, receive.memory)
        self.arriving: list[LaneSlots] = [
            LaneSlots(
                [self.incoming.front(turn, member) for member in range(shape.members)],
                [self.incoming.private(turn, member) for member in range(shape.members)],
            )
            for turn in range(shape.in_flight)
        ]
        width = shape.row_bytes
        self._outgoing = np.frombuffer(staging.memory, dtype=np.uint8)
        staged_rows = shape.members * shape.slot_rows + shape.area_rows
        self.staged: Bytes = self._outgoing[: staged_rows * width].reshape(-1, width)
        self.staged_back_offset: int = staged_rows * width
        self.back_dtype: torch.dtype = back_dtype
        end = self.staged_back_offset + shape.back_rows * shape.back_row_bytes
        self.staged_back: Bytes = self._outgoing[self.staged_back_offset : end].reshape(shape.back_rows, -1)

    def staged_front(self, member: int) -> Bytes:
        """Return the front of a member's slot in the staging region."""
        end = self.staged_slot_row(member)
        return self.staged[end - self.shape.front_rows : end].reshape(-1)

    def staged_private(self, member: int) -> Bytes:
        """Return the private rows of a member's slot in the staging region."""
        begin = self.staged_slot_row(member)
        return self.staged[begin : begin + self.shape.private]

    def staged_slot_row(self, member: int) -> int:
        """Return the staging row at which the private rows for a member begin."""
        return member * self.shape.slot_rows + self.shape.front_rows

    @property
    def staged_area_row(self) -> int:
        """The staging row at which the rows of a pass begin."""
        return self.shape.members * self.shape.slot_rows


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
