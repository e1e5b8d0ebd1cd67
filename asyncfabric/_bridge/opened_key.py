"""A region key as one engine knows it: opened on first use, closed when its last user is gone.

Opened on the event loop's thread. The finalizer may run anywhere, so it only leaves a note for the stairwell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncfabric._bridge.engine import KeyInfo

if TYPE_CHECKING:
    from asyncfabric._bridge.stairwell import Stairwell


class OpenedKey:
    """Held by each RegionKey and each transfer that uses it."""

    __slots__ = ("__weakref__", "access", "id", "info", "length", "stairwell")

    def __init__(self, stairwell: Stairwell, key_id: int, info: KeyInfo) -> None:
        self.stairwell: Stairwell = stairwell
        self.id: int = key_id
        self.info: KeyInfo = info
        self.length: int = info.length
        self.access: int = info.access

    def __del__(self) -> None:
        self.stairwell.dropped_keys.append(self.id)


def open_key(stairwell: Stairwell, data: bytes) -> OpenedKey:
    """Return the opened key of these bytes; raises EngineStatusError when the engine does not accept them."""
    opened = stairwell.opened_keys.get(data)
    if opened is None:
        stairwell.flush_dropped_keys()
        key_id, info = stairwell.engine.open_key(data)
        opened = stairwell.opened_keys[data] = OpenedKey(stairwell, key_id, info)
    return opened
