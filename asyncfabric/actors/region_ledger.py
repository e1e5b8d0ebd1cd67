"""RegionLedger: who owns which registered region: owner, bytes, age, cost. Nothing is released while a lease is out.

Runs on the event loop's thread, above no fabric in particular: a protocol states what is needed of a region.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import trio

from asyncfabric.errors import ClosedError


class RegisteredRegion(Protocol):
    """What is needed of a region; `asyncfabric.Region` has it."""

    @property
    def length(self) -> int:
        """Length in bytes."""
        ...

    async def release(self) -> None:
        """Deregister the memory; returns when nothing can touch it any more.

        Cancellation: shielded until then.
        """
        ...


R = TypeVar("R", bound=RegisteredRegion)


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One region, for people and metrics.

    Attributes:
        owner: who registered it.
        bytes: its length.
        age_s: seconds since it was registered.
        cost_s: seconds that registering took.
        leases: how many users hold it now.
        closing: whether its owner waits to release it.
    """

    owner: str
    bytes: int
    age_s: float
    cost_s: float
    leases: int
    closing: bool


class _LedgerEntry:
    def __init__(self, region: RegisteredRegion, owner: RegionOwner, cost_s: float) -> None:
        self.region = region
        self.owner = owner
        self.cost_s = cost_s
        self.since = trio.current_time()
        self.leases = 0
        self.idle = trio.Event()
        self.idle.set()


class RegionLedger:
    """The regions of one fabric and their owners."""

    def __init__(self) -> None:
        """Make an empty ledger."""
        self._entries: dict[int, _LedgerEntry] = {}

    def rows(self) -> tuple[LedgerRow, ...]:
        """Return the regions, the oldest first."""
        now = trio.current_time()
        return tuple(
            LedgerRow(
                entry.owner.name,
                entry.region.length,
                now - entry.since,
                entry.cost_s,
                entry.leases,
                entry.owner.closing,
            )
            for entry in self._entries.values()
        )

    @property
    def bytes(self) -> int:
        """Bytes registered now."""
        return sum(entry.region.length for entry in self._entries.values())

    @asynccontextmanager
    async def open_owner(self, name: str) -> AsyncIterator[RegionOwner]:
        """Own regions for the time of an `async with` block; its end waits for their leases and releases them.

        Raises what releasing raises; when several fail, an ExceptionGroup of them, after all were tried.

        Cancellation: shielded while leases are out and while regions are released, then it goes on.
        """
        owner = RegionOwner(self, name)
        try:
            yield owner
        finally:
            with trio.CancelScope(shield=True):
                await self._close(owner)

    @contextmanager
    def lease(self, region: RegisteredRegion) -> Iterator[None]:
        """Keep a region registered while the context is open, also when its owner ends meanwhile.

        Raises:
            ClosedError: the owner waits for the leases that are out, or the region is not in the ledger.
        """
        entry = self._entries.get(id(region))
        if entry is None or entry.owner.closing:
            raise ClosedError(
                f"{region!r} is being released or was never in the ledger", remedy="lease while its owner lives"
            )
        entry.leases += 1
        entry.idle = trio.Event() if entry.leases == 1 else entry.idle
        try:
            yield
        finally:
            entry.leases -= 1
            if entry.leases == 0:
                entry.idle.set()

    def _add(self, entry: _LedgerEntry) -> None:
        if id(entry.region) in self._entries:
            raise ValueError(f"{entry.region!r} has an owner: {self._entries[id(entry.region)].owner.name}")
        self._entries[id(entry.region)] = entry

    async def _close(self, owner: RegionOwner) -> None:
        owner.closing = True
        failures: list[Exception] = []
        for entry in reversed([one for one in self._entries.values() if one.owner is owner]):
            await entry.idle.wait()
            try:
                await entry.region.release()
            except Exception as failure:
                failures.append(failure)
            del self._entries[id(entry.region)]
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise ExceptionGroup(f"releasing the regions of {owner.name}", failures)


class RegionOwner:
    """A scope that owns regions; made by `ledger.open_owner`."""

    def __init__(self, ledger: RegionLedger, name: str) -> None:
        """Not for users: use `open_owner`."""
        self._ledger = ledger
        self.name = name
        self.closing = False

    async def register(self, register: Callable[[], Awaitable[R]]) -> R:
        """Register a region and own it: `await owner.register(lambda: fabric.allocate(length_bytes))`.

        Raises:
            ClosedError: the owner has ended.

        Cancellation: that of registering; what was registered is owned, so it is released with the owner.
        """
        if self.closing:
            raise ClosedError(f"{self.name} has ended, so it owns no new region")
        begun = trio.current_time()
        region = await register()
        if self.closing:  # it ended while registering: nobody else would release this
            with trio.CancelScope(shield=True):
                await region.release()
            raise ClosedError(f"{self.name} ended while it registered {region!r}")
        self._ledger._add(_LedgerEntry(region, self, trio.current_time() - begun))
        return region
