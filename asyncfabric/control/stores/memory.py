"""DirectoryStore: the five calls that directories need of a store; and MemoryStore, which is in this process.

On the event loop's thread. A store is small and strong: `create` has one winner, and who reads afterwards sees it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import anyio.lowlevel

from asyncfabric._notice import Notice


class DirectoryStore(Protocol):
    """Values by key, for all directories of a cluster. Every call raises BrokenError while the store is away."""

    async def create(self, key: str, value: bytes) -> bool:
        """Write a value where there is none; False where there is one.

        Cancellation: it may have been written. So it may where BrokenError is raised.
        """

    async def put(self, key: str, value: bytes) -> None:
        """Write a value, whatever is there.

        Cancellation: as for create.
        """

    async def get(self, key: str) -> bytes | None:
        """Return a value, None where there is none.

        Cancellation: only this call ends.
        """

    async def delete(self, keys: Iterable[str]) -> None:
        """Forget values.

        Cancellation: some may be forgotten.
        """

    async def wait(self, key: str) -> None:
        """Return when there is a value, or earlier: look again.

        Cancellation: only this call ends.
        """


class MemoryStore:
    """A store for the directories of this process: of one, where nobody else is given it."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = Notice()

    async def create(self, key: str, value: bytes) -> bool:
        """See DirectoryStore.

        Cancellation: nothing was written.
        """
        await anyio.lowlevel.checkpoint()
        if key in self._values:
            return False
        self._values[key] = value
        self._changed.notify()
        return True

    async def put(self, key: str, value: bytes) -> None:
        """See DirectoryStore.

        Cancellation: nothing was written.
        """
        await anyio.lowlevel.checkpoint()
        self._values[key] = value
        self._changed.notify()

    async def get(self, key: str) -> bytes | None:
        """See DirectoryStore.

        Cancellation: only this call ends.
        """
        await anyio.lowlevel.checkpoint()
        return self._values.get(key)

    async def delete(self, keys: Iterable[str]) -> None:
        """See DirectoryStore.

        Cancellation: nothing was forgotten.
        """
        await anyio.lowlevel.checkpoint()
        for key in keys:
            self._values.pop(key, None)

    async def wait(self, key: str) -> None:
        """See DirectoryStore.

        Cancellation: only this call ends.
        """
        await anyio.lowlevel.checkpoint()
        if key not in self._values:
            await self._changed.wait()
