"""Copies: the memory of versions at a receiver, its keys and readers; and which copy serves the engine.

Runs on the event loop's thread. `step_boundary` is the only place where what serves changes (WC-5).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from asyncfabric import ClosedError, Fabric, InternalError, Region, RegionKey
from asyncfabric._notice import Notice
from asyncfabric.weights.memory.device import Device, Memory
from asyncfabric.weights.memory.rows import TensorLayout
from asyncfabric.weights.receiver.machine import Effect, Receiver


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


Tensors = dict[str, Memory]
"""By name: bytes, an array of numpy in host memory, a tensor of torch on a GPU."""


class Serving:
    """The copies of a receiver, and the one of them that serves; the base of WeightReplica."""

    def __init__(self, copies: list[Copy], manifest: str = "") -> None:
        """Serve nothing yet; `manifest` is the digest of the plan without replicas."""
        self._copies = copies
        self._machine = Receiver(in_place=len(copies) == 1, manifest=manifest)
        self._serving = 0
        self._serving_copy = -1
        self._changed = Notice()
        self._closed = False

    def current_version(self) -> int:
        """Return the version that serves, 0 for none."""
        return self._serving

    @property
    def serving_copy(self) -> int:
        """Which of `copies` serves, -1 for none."""
        return self._serving_copy

    @property
    def copies(self) -> list[Tensors]:
        """The tensors of each copy, as bytes, to make views of once; only those of `serving_copy` are whole."""
        return [copy.tensors for copy in self._copies]

    def tensors(self) -> Tensors:
        """Return the bytes of the tensors that serve; empty when none do. Valid until the next `step_boundary()`."""
        return self._copies[self._serving_copy].tensors if self._serving_copy >= 0 else {}

    def step_boundary(self) -> int:
        """Say that no step reads the tensors now: what is decided serves (WC-5), what waits may be overwritten.

        Returns the version that serves until the next call; 0 for none, then do not step.

        Raises:
            ClosedError: the replica was left, and its memory with it.
            InternalError: what was decided is in no copy. What served before serves on.
        """
        if self._closed:
            raise ClosedError("this replica was left, and its memory is released", remedy="step within `open_replica`")
        coming = self._copy_of(self._machine.held_arrival)  # before anything changes
        effects = self._machine.flip()
        serving = self._machine.serving
        if serving != self._serving:
            self._serving = serving
            self._serving_copy = coming if serving else -1
            self._notify()
        self._carry_out(effects)
        return self._serving

    def _copy_of(self, arrival: int) -> int:
        """Return the number of the copy that an arrival completed, -1 for no arrival."""
        if not arrival:
            return -1
        for number, copy in enumerate(self._copies):
            if copy.arrival == arrival:
                return number
        have = [(copy.version, copy.arrival) for copy in self._copies]
        raise InternalError(
            f"version {self._machine.held} came with arrival {arrival}, but the copies hold (version, arrival) {have}",
            remedy="this is a defect of asyncfabric; please report it with this text",
        )

    @property
    def waits_for_boundary(self) -> bool:
        """Whether the next `step_boundary()` changes anything."""
        return self._machine.waits_for_flip

    async def wait_version(self, version: int) -> None:
        """Return when this version, or a later one, serves from the next `step_boundary()` at the latest.

        Cancellation: only this wait ends.
        """
        while self._machine.held < version:
            await self._changed.wait()

    def _free_copy(self) -> Copy:
        """Return the copy that does not serve; in place the machine asks for it when nothing does."""
        return next(copy for number, copy in enumerate(self._copies) if number != self._serving_copy)

    async def wait_changed(self) -> None:
        """Return when a `step_boundary()` is waited for.

        Cancellation: only this wait ends.
        """
        while not self.waits_for_boundary:
            await self._changed.wait()

    def _carry_out(self, effects: list[Effect]) -> None:
        """Do what the machine says."""
        raise NotImplementedError

    def _notify(self) -> None:
        self._changed.tell()
