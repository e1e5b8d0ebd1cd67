"""A region key as one engine knows it: opened on first use, closed when its last user is gone.

Opened on the event loop's thread. The finalizer may run anywhere, so it only leaves a note for the
completion dispatcher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncfabric._bridge.engine import KeyInfo

if TYPE_CHECKING:
    from asyncfabric._bridge.dispatcher import CompletionDispatcher


class OpenedKey:
    """Held by each RegionKey and each transfer that uses it."""

    __slots__ = ("__weakref__", "access", "dispatcher", "id", "info", "length")

    def __init__(self, dispatcher: CompletionDispatcher, key_id: int, info: KeyInfo) -> None:
        self.dispatcher: CompletionDispatcher = dispatcher
        self.id: int = key_id
        self.info: KeyInfo = info
        self.length: int = info.length
        self.access: int = info.access

    def __del__(self) -> None:
        self.dispatcher.dropped_keys.append(self.id)


def open_key(dispatcher: CompletionDispatcher, data: bytes) -> OpenedKey:
    """Return the opened key of these bytes; raises EngineStatusError when the engine does not accept them."""
    opened = dispatcher.opened_keys.get(data)
    if opened is None:
        dispatcher.flush_dropped_keys()
        key_id, info = dispatcher.engine.open_key(data)
        opened = dispatcher.opened_keys[data] = OpenedKey(dispatcher, key_id, info)
    return opened
