"""LaneMemory: the two regions of a lane, and arrays over their parts.

Runs on the event loop's thread. What lies where stands in LaneShape.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import numpy as np
import torch

from asyncfabric import Fabric, Region
from asyncfabric.moe.host.buffers import LaneShape
from asyncfabric.moe.host.record import Bytes


class LaneMemory:
    """Receiving and staging memory of one member."""

    def __init__(self, shape: LaneShape, back_dtype: torch.dtype, receive: Region, staging: Region) -> None:
        """Look at two regions of `shape.receive_bytes` and `shape.staging_bytes`."""
        self.shape: LaneShape = shape
        self.receive: Region = receive
        self.staging: Region = staging
        width = shape.row_bytes
        incoming = np.frombuffer(receive.memory, dtype=np.uint8)
        self._incoming = incoming
        self.rows: Bytes = incoming[: shape.in_rows * width].reshape(-1, width)
        self._outgoing = np.frombuffer(staging.memory, dtype=np.uint8)
        staged_rows = shape.members * shape.slot_rows + shape.area_rows
        self.staged: Bytes = self._outgoing[: staged_rows * width].reshape(-1, width)
        self.staged_back_offset: int = staged_rows * width
        back_bytes = shape.back_rows * shape.back_row_bytes
        self.back_dtype: torch.dtype = back_dtype
        self.staged_back: Bytes = self._back(self._outgoing, self.staged_back_offset, back_bytes)
        self.back: list[Bytes] = [
            self._back(incoming, shape.back_offset(turn), back_bytes) for turn in range(shape.in_flight)
        ]

    def front(self, turn: int, member: int) -> Bytes:
        """Return the front of a member's slot in the receiving region."""
        end = self.shape.slot_row(turn, member)
        return self.rows[end - self.shape.front_rows : end].reshape(-1)

    def staged_front(self, member: int) -> Bytes:
        """Return the front of a member's slot in the staging region."""
        end = self.staged_slot_row(member)
        return self.staged[end - self.shape.front_rows : end].reshape(-1)

    def staged_slot_row(self, member: int) -> int:
        """Return the staging row at which the private rows for a member begin."""
        return member * self.shape.slot_rows + self.shape.front_rows

    @property
    def staged_area_row(self) -> int:
        """The staging row at which the rows of a pass begin."""
        return self.shape.members * self.shape.slot_rows

    def _back(self, memory: Bytes, at: int, length: int) -> Bytes:
        return memory[at : at + length].reshape(self.shape.back_rows, -1)


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
