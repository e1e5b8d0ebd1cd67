"""Copies: the memory of versions at a receiver, its keys and readers; a whole copy fetched from another receiver.

Runs on the event loop's thread; hashing runs on worker threads. A receiver that lacks a version gets it from another
one of the same rank, chunk by chunk, checked. The holder writes, so that rails that cannot read do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import NamedTuple

import anyio
import numpy as np
from anyio.lowlevel import checkpoint_if_cancelled

from asyncfabric import (
    BrokenError,
    BusyError,
    Fabric,
    FabricError,
    Region,
    Transfer,
)
from asyncfabric._groups import unwrapped
from asyncfabric._notice import Notice
from asyncfabric.weights.memory.checksums import CHUNK_BYTES, ChecksumKind, chunks_of, wrong_chunks
from asyncfabric.weights.memory.device import Device, Memory, stretch
from asyncfabric.weights.memory.rows import ALIGN_BYTES, TensorLayout, layout_of
from asyncfabric.weights.messages import Given, Keys, Want
from asyncfabric.weights.plan.plan import Plan
from asyncfabric.weights.threads import in_thread
from asyncfabric.weights.writing import KeyedMemory, settle


class Door(NamedTuple):
    """A part of a copy that is reached by a key of its own.

    Attributes:
        begin: the byte of the receiver's layout, as its senders know it, that the part begins at.
        at: where it begins in the memory of the copy.
        region, offset, length: its bytes.
    """

    begin: int
    at: int
    region: Region
    offset: int
    length: int


class Copy:
    """One copy of a receiver's tensors.

    Attributes:
        doors: its parts, in the order of the layout.
        layout: where the tensors lie in `memory`.
        device: what works on it.
        memory: its bytes.
        tensors: the bytes of each tensor.
        version: what is complete in it, 0 while something is being written or nothing was.
        arrival: the arrival that completed it, 0 for none: it distinguishes versions that were begun twice (WC-7).
    """

    def __init__(self, doors: Sequence[Door], layout: TensorLayout, device: Device, memory: Memory) -> None:
        """Look at memory on a device."""
        self.doors: Sequence[Door] = doors
        self.layout: TensorLayout = layout
        self.device: Device = device
        self.memory: Memory = memory
        self.tensors: dict[str, Memory] = layout.views(memory)
        self.version: int = 0
        self.arrival: int = 0
        self._regions = {door.region.id: door.region for door in doors}
        self._known = False  # whether somebody has a key that may write
        self._lent = 0
        self._returned = Notice()

    async def open(self) -> Keys:
        """Return keys that no earlier version had; whatever had one before can write no more (WC-4).

        Cancellation: the memory stays as it is, or is closed or open; nobody has the keys.
        """
        while self._lent:
            await self._returned.wait()
        await checkpoint_if_cancelled()  # an arrival that was dropped leaves alone what is here
        self.version = self.arrival = 0
        await self.close()
        self._known = True
        return [
            (door.begin, door.region[door.offset : door.offset + door.length].key("write").to_bytes())
            for door in self.doors
        ]

    def complete(self, version: int, arrival: int) -> None:
        """Note what is complete here."""
        self.version, self.arrival = version, arrival

    async def close(self) -> None:
        """Take back every key, if any was handed out since the last time; returns when no write can land any more.

        Cancellation: the revocation goes on.
        """
        if self._known:
            with unwrapped():
                async with anyio.create_task_group() as tasks:
                    for region in self._regions.values():
                        tasks.start_soon(region.revoke)
            self._known = False

    def chunks(self) -> Iterator[tuple[Door, slice]]:
        """Yield all bytes in the order of the layout, in chunks with a checksum each: the part, and where in it."""
        for door in self.doors:
            for part in chunks_of(door.length, CHUNK_BYTES):
                yield door, part

    def lies_in(self, at: int) -> tuple[Region, int]:
        """Return the region of a byte of the memory, and what leads from places in the memory to places in it."""
        door = next(door for door in self.doors if door.at <= at < door.at + door.length)
        return door.region, door.offset - door.at

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
        yield [
            Copy([Door(0, 0, region, 0, region.length)], layout, device, device.memory_of(region)) for region in regions
        ]
    finally:
        await _release(regions)


@asynccontextmanager
async def open_copy_in(
    fabric: Fabric, plan: Plan, receiver: int, own: Mapping[str, Memory], device: Device
) -> AsyncIterator[list[Copy]]:
    """Make a copy of memory that the caller has: registered, and released on leaving; it stays where it is.

    Args:
        fabric: that it is reached through.
        plan: lists the tensors.
        receiver: whose they are.
        own: the bytes of tensors, by name, on the device, none in two of them. Others have memory beside.
        device: of all.

    Raises:
        DeviceError: memory cannot be registered, or there is none left.

    Cancellation: shielded while memory is registered and released; then it goes on.
    """
    layout = layout_of(plan, receiver)
    beside, beside_bytes = {}, 0
    for name, length in layout.lengths.items():
        if length and name not in own:
            beside[name] = beside_bytes
            beside_bytes += -(-length // ALIGN_BYTES) * ALIGN_BYTES
    regions: list[Region] = []
    places: dict[str, tuple[Region, int]] = {}
    try:
        for name, memory in own.items():
            regions.append(await fabric.register(memory, access="read-write"))
            places[name] = regions[-1], 0
        if beside:
            regions.append(await fabric.allocate(beside_bytes, device=device.name, access="read-write"))
            places |= {name: (regions[-1], at) for name, at in beside.items()}
        begins = {region.id: device.address(device.memory_of(region)) for region in regions}
        low = min(begins.values(), default=0) // ALIGN_BYTES * ALIGN_BYTES
        high = max((begins[region.id] + region.length for region in regions), default=0)
        at = {name: begins[region.id] + offset - low for name, (region, offset) in places.items()}
        placed = TensorLayout(plan, receiver, {name: at.get(name, 0) for name in layout.lengths})
        doors = [
            Door(layout.offsets[name], at[name], *places[name], layout.lengths[name])
            for name in layout.lengths
            if name in places
        ]
        yield [Copy(doors, placed, device, device.window(low, high - low))]
    finally:
        await _release(regions)


async def _release(regions: Sequence[Region]) -> None:
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
        await self._counter.wait(len(list(self._copy.chunks())))
        await self._copy.close()  # what is checked now stays as it is
        expected = np.frombuffer(self._sums or b"", "<u8")
        try:
            wrong = wrong_chunks(await in_thread(_sums, self._copy, self._kind), expected)
        except ValueError as error:
            raise BrokenError(f"{self._source} gave another memory than this receiver has: {error}") from error
        if wrong:
            raise BrokenError(f"chunks {wrong[:8]} of version {self._version} from {self._source} have wrong bytes")


async def give(fabric: Fabric, copy: Copy, want: Want) -> Given:
    """Write a copy behind the keys of a receiver that wants it, and return the answer for it.

    Cancellation: stops posting, and goes on when what was posted has drained.
    """
    try:
        there = KeyedMemory(want.keys)
        theirs = list(zip(there.begins.tolist(), [key.length for key in there.keys], strict=True))
        if theirs != [(door.begin, door.length) for door in copy.doors]:
            theirs_bytes, bytes_here = sum(length for _, length in theirs), sum(door.length for door in copy.doors)
            raise ValueError(
                f"it has {theirs_bytes} bytes of memory in {len(theirs)} parts, this receiver {bytes_here} in "
                f"{len(copy.doors)}"
            )
        key_of = dict(zip(copy.doors, there.keys, strict=True))
        kind: ChecksumKind = "words" if "words" in (want.checksum, copy.device.checksum) else "xxh3"
        sums = await in_thread(_sums, copy, kind)
        under_way: list[Transfer] = []
        try:
            for door, part in copy.chunks():
                source = door.region[door.offset + part.start : door.offset + part.stop]
                while len(under_way) >= IN_FLIGHT:
                    await under_way.pop(0)
                while True:
                    try:
                        under_way.append(fabric.write(source, key_of[door], part.start, want.imm))
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
    for door, part in copy.chunks():
        found.add([stretch(copy.memory, door.at + part.start, part.stop - part.start)])
    return np.array(found.result(), np.uint64)
