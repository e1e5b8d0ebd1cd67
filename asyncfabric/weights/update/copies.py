"""Copy: the memory of one version at a receiver: a region with all its tensors, its keys, and who reads it meanwhile.

Runs on the event loop's thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from asyncfabric import Fabric, Region, RegionKey
from asyncfabric._notice import Notice
from asyncfabric.weights.update.device import Device, Memory
from asyncfabric.weights.update.layout import TensorLayout


class Copy:
    """One copy of a receiver's tensors.

    Attributes:
        region: where it lies.
        device: what works on it.
        memory: its bytes.
        tensors: the bytes of each tensor.
        version: what is complete in it, 0 while something is being written or nothing was.
        arrival: the arrival that completed it, 0 for none: it tells versions apart that were begun twice (WC-7).
    """

    def __init__(self, region: Region, layout: TensorLayout, device: Device) -> None:
        """Look at a region of `layout.total_bytes` on a device."""
        self.region: Region = region
        self.device: Device = device
        self.memory: Memory = device.memory_of(region)
        self.tensors: dict[str, Memory] = layout.views(self.memory)
        self.version: int = 0
        self.arrival: int = 0
        self._known = False  # whether somebody has a key that may write
        self._lent = 0
        self._returned = Notice()

    async def open(self) -> RegionKey:
        """Return a key that no earlier version had; whatever had one before can write no more (WC-4).

        Cancellation: the memory stays as it is, or is closed or open; nobody has the key.
        """
        while self._lent:
            await self._returned.wait()
        await checkpoint_if_cancelled()  # an arrival that was dropped leaves alone what is here
        self.version = self.arrival = 0
        await self.close()
        self._known = True
        return self.region.key("write")

    def complete(self, version: int, arrival: int) -> None:
        """Note what is complete here."""
        self.version, self.arrival = version, arrival

    async def close(self) -> None:
        """Take back every key, if any was told since the last time; returns when no write can land any more.

        Cancellation: the revocation goes on.
        """
        if self._known:
            await self.region.revoke()
            self._known = False

    @contextmanager
    def lend(self) -> Iterator[None]:
        """Keep the memory from being opened while it is read for somebody else."""
        self._lent += 1
        try:
            yield
        finally:
            self._lent -= 1
            self._returned.tell()


@asynccontextmanager
async def open_copies(fabric: Fabric, layout: TensorLayout, count: int, device: Device) -> AsyncIterator[list[Copy]]:
    """Allocate copies on a device; released on leaving.

    Raises:
        DeviceError: no memory left.

    Cancellation: shielded while memory is released; then it goes on.
    """
    regions: list[Region] = []
    try:
        for _ in range(count):
            regions.append(await fabric.allocate(layout.total_bytes, device=device.name, access="read-write"))
        yield [Copy(region, layout, device) for region in regions]
    finally:
        with anyio.CancelScope(shield=True):
            for region in regions:
                await region.release()
