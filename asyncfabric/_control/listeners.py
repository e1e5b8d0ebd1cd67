"""Where arrivals and changes wait for the tasks that take them: inboxes of channels, outlets of watchers.

On the event loop's thread. Each has one forwarding task while somebody listens; nothing here knows sockets. Inboxes are
bounded by the credit of their senders, outlets by the number of peers that one knows.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Final

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from asyncfabric._control.events import Arrival, SessionChange
from asyncfabric._control.messages import Identity
from asyncfabric.errors import BusyError

MAX_UNSEEN_CHANGES: Final = 4096
Taken = Callable[[], None]


class Inbox:
    """Arrivals of one channel in the order in which they came."""

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self.listened = False
        self._waiting: deque[tuple[Arrival, Taken]] = deque()
        self._filled = anyio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, arrival: Arrival, taken: Taken) -> None:
        """Add an arrival; `taken` is called when the listener's stream has it, and gives its sender credit."""
        self._waiting.append((arrival, taken))
        self._filled.set()

    def forget(self, sender: Identity) -> int:
        """Drop what a sender sent; return how much that was."""
        before = len(self._waiting)
        self._waiting = deque(item for item in self._waiting if item[0].sender != sender)
        return before - len(self._waiting)

    @asynccontextmanager
    async def listen(self, tasks: TaskGroup, frames: int) -> AsyncIterator[MemoryObjectReceiveStream[Arrival]]:
        """Give the arrivals to one task. What it did not take when it leaves waits for the next.

        Raises:
            BusyError: another task listens.

        Cancellation: nothing is lost.
        """
        if self.listened:
            raise BusyError(
                f"channel {self.channel!r} has a listener", remedy="one task listens on a channel and hands on"
            )
        send, receive = anyio.create_memory_object_stream[Arrival](frames)
        scope = anyio.CancelScope()
        self.listened = True
        tasks.start_soon(self._forward, send, scope)
        try:
            yield receive
        finally:
            self._put_back(receive)
            receive.close()
            send.close()
            scope.cancel()
            self.listened = False

    def _put_back(self, stream: MemoryObjectReceiveStream[Arrival]) -> None:
        """Keep what the listener did not take. It has had its credit, or gets it in `_forward`: not again here."""
        unread: list[Arrival] = []
        try:
            while True:
                unread.append(stream.receive_nowait())
        except (anyio.WouldBlock, anyio.ClosedResourceError, anyio.EndOfStream):
            pass  # nothing more, or the listener closed its stream and with it threw away what was there
        self._waiting.extendleft((arrival, _nothing) for arrival in reversed(unread))

    async def _forward(self, stream: MemoryObjectSendStream[Arrival], scope: anyio.CancelScope) -> None:
        with scope:
            while True:
                while not self._waiting:
                    self._filled = anyio.Event()
                    await self._filled.wait()
                arrival, taken = self._waiting.popleft()
                try:
                    await stream.send(arrival)
                except anyio.BrokenResourceError:
                    self._waiting.appendleft((arrival, taken))
                    return
                except anyio.get_cancelled_exc_class():
                    taken()  # the listener leaves, and its last look into the stream has found this one
                    raise
                taken()


def _nothing() -> None:
    """Give no credit."""


class Outlet:
    """Changes for one watcher; of a peer that changed more than once unseen, the last change is told."""

    def __init__(self, now: Iterable[SessionChange]) -> None:
        self._unseen: OrderedDict[Identity, SessionChange] = OrderedDict((change.peer, change) for change in now)
        self._filled = anyio.Event()
        self.overrun = False

    def put(self, change: SessionChange) -> None:
        """Add a change."""
        self._unseen.pop(change.peer, None)
        self._unseen[change.peer] = change
        self.overrun = self.overrun or len(self._unseen) > MAX_UNSEEN_CHANGES
        self._filled.set()

    async def forward(self, stream: MemoryObjectSendStream[SessionChange], scope: anyio.CancelScope) -> None:
        """Hand changes on until the watcher leaves, or is so far behind that it has to watch anew.

        Cancellation: ends the forwarding.
        """
        with scope, stream:
            while not self.overrun:
                if not self._unseen:
                    self._filled = anyio.Event()
                    await self._filled.wait()
                    continue
                _, change = self._unseen.popitem(last=False)
                try:
                    await stream.send(change)
                except anyio.BrokenResourceError:
                    return
