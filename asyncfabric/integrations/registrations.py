"""Registrations by address range, counted: memory is registered for its first holder and released with its last.

Any thread. What frameworks hand over again and again (a storage behind many tensors, a buffer of each step) costs one
registration for as long as somebody holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

from asyncfabric.blocking import Fabric, Region


class Range(NamedTuple):
    """A range of memory: device as in `region.device`, first address, bytes."""

    device: str
    address: int
    length: int


@dataclass
class _HeldRegion:
    region: Region
    holders: int


class Registrations:
    """The regions of one fabric that several hold at once. Peers may be given keys to read them."""

    def __init__(self, fabric: Callable[[], Fabric]) -> None:
        """Not opened yet: `fabric` is called for the first registration."""
        self._fabric = fabric
        self._lock = Lock()
        self._entries: dict[Range, _HeldRegion] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def hold(self, memory: Range, buffer: Callable[[], object]) -> Region:
        """Return the region of a range, registered now or before; `let_go` gives it back.

        Args:
            memory: the range.
            buffer: returns what owns exactly that memory; called when it has to be registered.

        Raises:
            DeviceError: no memory could be pinned.
            ClosedError: the fabric is closed.
        """
        with self._lock:
            entry = self._entries.get(memory)
            if entry is None or entry.region.released:
                entry = self._entries[memory] = _HeldRegion(self._fabric().register(buffer(), access="read"), 0)
            entry.holders += 1
            return entry.region

    def let_go(self, memory: Range) -> None:
        """Give one hold back; with the last one the region is released, which waits until nothing can touch it.

        Raises:
            KeyError: nobody holds the range.
            TransferError: a device may still touch the memory, so it stays pinned until the process ends.
        """
        with self._lock:
            entry = self._entries[memory]
            entry.holders -= 1
            if entry.holders:
                return
            del self._entries[memory]
        entry.region.release()  # not under the lock: a peer that reads from it now may take a while to end
