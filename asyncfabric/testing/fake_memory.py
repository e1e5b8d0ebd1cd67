"""The region table of a fake engine: addresses, generations, rights, and who still uses the memory.

Every call is made under the lock of the network. Bytes move by address (ctypes), as a NIC would move them: nothing
here keeps foreign memory alive, that is the caller's promise until release ends.
"""

from __future__ import annotations

import ctypes
import mmap
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncfabric._bridge.status import StatusCode, refusal
from asyncfabric.testing.fake_keys import FakeKey


@dataclass(slots=True, eq=False)
class FakeRegion:
    """One region. `users` counts ops whose work may still read or write the memory."""

    id: int
    base: int
    length: int
    access: int
    memory: mmap.mmap | None = None
    generation: int = 1
    secret: int = field(default_factory=lambda: secrets.randbits(64))
    users: int = 0
    releasing: Callable[[StatusCode], None] | None = None
    quarantined: bool = False


class RegionTable:
    """All regions of one engine; ids are never reused."""

    def __init__(self) -> None:
        self.live: dict[int, FakeRegion] = {}
        self._last_id = 0

    def add(self, base: int, length: int, access: int) -> FakeRegion:
        """Add memory of the caller."""
        self._last_id += 1
        region = self.live[self._last_id] = FakeRegion(self._last_id, base, length, access)
        return region

    def allocate(self, length: int, access: int) -> FakeRegion:
        """Add pages of the engine's own."""
        memory = mmap.mmap(-1, length)
        region = self.add(ctypes.addressof(ctypes.c_char.from_buffer(memory)), length, access)
        region.memory = memory
        return region

    def find(self, region_id: int) -> FakeRegion:
        """Return a region that may be used; refuses released ones."""
        region = self.live.get(region_id)
        if region is None or region.releasing is not None:
            raise refusal(StatusCode.CLOSED, f"region {region_id} was released or never existed")
        return region

    def check(self, region: FakeRegion, offset: int, length: int) -> None:
        """Refuse a range that leaves the region."""
        if offset < 0 or length < 0 or offset + length > region.length:
            raise refusal(
                StatusCode.OUT_OF_BOUNDS, f"offset {offset} length {length} in a region of {region.length} bytes"
            )

    def revoke(self, region: FakeRegion) -> None:
        """Make every key handed out so far stale."""
        region.generation += 1
        region.secret = secrets.randbits(64)

    def release(self, region: FakeRegion, done: Callable[[StatusCode], None]) -> None:
        """Call `done` once nothing can touch the memory any more, or that this cannot be known."""
        region.releasing = done
        self.settle(region)

    def settle(self, region: FakeRegion) -> None:
        """End a release that waited for the last user."""
        if region.releasing is None or region.users:
            return
        done, region.releasing = region.releasing, None
        if region.quarantined:
            done(StatusCode.DRAIN_TIMEOUT)
            return
        del self.live[region.id]
        done(StatusCode.OK)

    def target(self, key: FakeKey, right: int) -> tuple[StatusCode, int]:
        """Return the address that a key opens for a right (Access bit), as the target's NIC would judge it."""
        region = self.live.get(key.region)
        if region is None or region.releasing is not None or region.generation != key.generation:
            return StatusCode.STALE_KEY, 0
        if region.secret != key.secret or not key.access & region.access & right:
            return StatusCode.ACCESS_DENIED, 0
        if key.offset + key.length > region.length:
            return StatusCode.ACCESS_DENIED, 0
        return StatusCode.OK, region.base + key.offset
