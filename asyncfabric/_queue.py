"""Queue: items in order between tasks of one event loop, with or without a bound. Event loop's thread."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from anyio.lowlevel import checkpoint

from asyncfabric._notice import Notice

Item = TypeVar("Item")


class Queue(Generic[Item]):
    """Items in order. anyio's streams want to be closed at both ends; a queue may simply be forgotten."""

    def __init__(self, room: int = 0) -> None:
        """Hold any number of items, or `room` of them."""
        self._items: deque[Item] = deque()
        self._room = room
        self._closed = False
        self._changed = Notice()

    def put_nowait(self, item: Item) -> None:
        """Add an item, whether there is room or not; nobody takes what is added after `close()`."""
        if not self._closed:
            self._items.append(item)
            self._changed.notify()

    async def put(self, item: Item) -> None:
        """Add an item once there is room.

        Cancellation: it was not added.
        """
        await checkpoint()
        while self._room and len(self._items) >= self._room:
            await self._changed.wait()
        self.put_nowait(item)

    def take_nowait(self) -> list[Item]:
        """Return everything that is in the queue now, perhaps nothing."""
        items = list(self._items)
        if items:
            self._items.clear()
            self._changed.notify()
        return items

    def next_nowait(self) -> Item | None:
        """Return the next item if there is one now."""
        if not self._items:
            return None
        item = self._items.popleft()
        self._changed.notify()
        return item

    def __len__(self) -> int:
        return len(self._items)

    def close(self) -> None:
        """Announce that nothing more will come."""
        self._closed = True
        self._changed.notify()

    def __aiter__(self) -> Queue[Item]:
        return self

    async def __anext__(self) -> Item:
        """Return the next item; ends when the queue is closed and empty.

        Cancellation: nothing is lost.
        """
        await checkpoint()
        while (item := self.next_nowait()) is None:
            if self._closed:
                raise StopAsyncIteration
            await self._changed.wait()
        return item
