"""Copies: the memory of versions at a receiver, its keys and readers; a whole copy fetched from another receiver.

Runs on the event loop's thread; hashing runs on worker threads. A receiver that lacks a version gets it from another
one of the same rank, chunk by chunk, checked. The holder writes, so that rails that cannot read do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType

import anyio
import numpy as np
from anyio.lowlevel import checkpoint_if_cancelled

from asyncfabric import (
    BrokenError,
    BusyError,
    Fabric,
    FabricError,
    Region,
    RegionKey,
    Transfer,
)
from asyncfabric._notice import Notice
from asyncfabric.weights.memory.checksums import CHUNK_BYTES, ChecksumKind, chunks_of, wrong_chunks
from asyncfabric.weights.memory.device import Device, Memory, stretch
from asyncfabric.weights.memory.rows import TensorLayout
from asyncfabric.weights.messages import Given, Want
from asyncfabric.weights.threads import in_thread
from asyncfabric.weights.writing import settle


class Copy:
    """One copy of a receiver's tensors.

    Attributes:
        region: where it lies.
        device: what works on it.
        memory: its bytes.
        tensors: the bytes of each tensor.
        version: what is complete in it, 0 while something is being written or nothing was.
        arrival: the arrival that completed it, 0 for none: it distinguishes versions that were begun twice (WC-7).
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
        """Take back every key, if any was handed out since the last time; returns when no write can land any more.

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
            self._returned.notify()


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


IN_FLIGHT = 4
"""Chunks under way at once."""


class Fetching:
    """A version on its way from one receiver; used with `with`."""

    def __init__(self, fabric: Fabric, version: int, source: str, copy: Copy) -> None:
        """Open the counter."""
        self._counter = fabric.counter()
        self.imm: int = self._counter.imm
        self._version = version
        self._source = source
        self._copy = copy
        self._sums: bytes | None = None
        self._kind: ChecksumKind = "xxh3"
        self._failure = ""
        self._answered = anyio.Event()

    def __enter__(self) -> Fetching:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the counter; what arrives later is stale."""
        self._counter.close()

    def take(self, sender: str, given: Given) -> None:
        """Take the answer."""
        if sender == self._source and (given.version, given.imm) == (self._version, self.imm):
            self._sums, self._kind, self._failure = given.sums, given.checksum, given.reason
            self._answered.set()

    def lost(self, name: str, reason: str) -> None:
        """A participant is lost; it may be the source."""
        if name == self._source and not self._answered.is_set():
            self._failure = f"{name} is lost: {reason}"
            self._answered.set()

    async def run(self) -> None:
        """Return when the version is here and right.

        Raises:
            BrokenError: the source is lost or does not hold it, or bytes are wrong.

        Cancellation: at once; the caller takes back the key.
        """
        await self._answered.wait()
        if self._failure:
            raise BrokenError(f"version {self._version} could not be fetched from {self._source}: {self._failure}")
        await self._counter.wait(len(list(chunks_of(self._copy.region.length))))
        await self._copy.close()  # what is checked now stays as it is
        expected = np.frombuffer(self._sums or b"", "<u8")
        try:
            wrong = wrong_chunks(await in_thread(_sums, self._copy, self._kind), expected)
        except ValueError as error:
            raise BrokenError(f"{self._source} gave another memory than this receiver has: {error}") from error
        if wrong:
            raise BrokenError(f"chunks {wrong[:8]} of version {self._version} from {self._source} have wrong bytes")


async def give(fabric: Fabric, copy: Copy, want: Want) -> Given:
    """Write a copy behind the key of a receiver that wants it, and return the answer for it.

    Cancellation: stops posting, and goes on when what was posted has drained.
    """
    try:
        key = RegionKey.from_bytes(want.key)
        if key.length != copy.region.length:
            raise ValueError(f"it has {key.length} bytes of memory, this receiver {copy.region.length}")
        kind: ChecksumKind = "words" if "words" in (want.checksum, copy.device.checksum) else "xxh3"
        sums = await in_thread(_sums, copy, kind)
        under_way: list[Transfer] = []
        try:
            for part in chunks_of(copy.region.length, CHUNK_BYTES):
                while len(under_way) >= IN_FLIGHT:
                    await under_way.pop(0)
                while True:
                    try:
                        under_way.append(fabric.write(copy.region[part], key, part.start, want.imm))
                        break
                    except BusyError:
                        await fabric.wait_writable()
        finally:
            errors = await settle(under_way)
        for error in errors:
            if error is not None:
                raise error
    except (FabricError, ValueError) as error:
        return Given(want.version, want.imm, b"", str(error)[:2000])
    return Given(want.version, want.imm, sums.astype("<u8").tobytes(), checksum=kind)


def _sums(copy: Copy, kind: ChecksumKind) -> np.ndarray:
    """Return the checksums of all chunks. On a worker thread."""
    found = copy.device.sums(kind)
    for part in chunks_of(copy.region.length):
        found.add([stretch(copy.memory, part.start, part.stop - part.start)])
    return np.array(found.result(), np.uint64)
