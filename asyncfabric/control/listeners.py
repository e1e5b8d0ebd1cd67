"""Where arrivals and changes wait for the tasks that take them: inboxes of channels, outlets of watchers.

On the event loop's thread; nothing here knows sockets. Inboxes are bounded by the credit of their senders, outlets by
the number of peers that one knows.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from asyncfabric.control.events import Arrival, SessionChange
from asyncfabric.control.messages import Identity
from asyncfabric.errors import BusyError

MAX_UNSEEN_CHANGES: Final = 4096
Taken = Callable[[], None]


class ArrivalStream(MemoryObjectReceiveStream[Arrival]):
    """The stream of a listener. Whenever something is taken from it, its inbox fills it again.

    No task stands between inbox and stream: one that is cancelled as it hands an arrival over cannot know who has it.
    """

    def __init__(self, stream: MemoryObjectReceiveStream[Arrival], refill: Callable[[], None]) -> None:
        super().__init__(stream._state)
        self._refill = refill

    def receive_nowait(self) -> Arrival:
        """Return the next arrival, or raise what the base class raises."""
        arrival = super().receive_nowait()
        self._refill()
        return arrival


class Inbox:
    """Arrivals of one channel in the order in which they came."""

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self._waiting: deque[tuple[Arrival, Taken]] = deque()
        self._stream: MemoryObjectSendStream[Arrival] | None = None  # of the present listener

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def listened(self) -> bool:
        """Whether somebody listens."""
        return self._stream is not None

    def put(self, arrival: Arrival, taken: Taken) -> None:
        """Add an arrival; `taken` is called when the listener's stream has it, and gives its sender credit."""
        self._waiting.append((arrival, taken))
        self._fill()

    def forget(self, sender: Identity) -> int:
        """Drop what a sender sent; return how much that was."""
        before = len(self._waiting)
        self._waiting = deque(item for item in self._waiting if item[0].sender != sender)
        return before - len(self._waiting)

    @contextmanager
    def listen(self, frames: int) -> Iterator[MemoryObjectReceiveStream[Arrival]]:
        """Give the arrivals to one task. What it did not take when it leaves waits for the next.

        Raises:
            BusyError: another task listens.
        """
        if self._stream is not None:
            raise BusyError(
                f"channel {self.channel!r} has a listener", remedy="one task listens on a channel and hands on"
            )
        self._stream, plain = anyio.create_memory_object_stream[Arrival](frames)
        arrivals = ArrivalStream(plain, self._fill)
        plain.close()
        self._fill()
        try:
            yield arrivals
        finally:
            self._stream.close()
            self._stream = None
            unread: list[Arrival] = []
            try:
                while True:
                    unread.append(arrivals.receive_nowait())
            except (anyio.EndOfStream, anyio.ClosedResourceError):
                pass  # nothing more, or the listener closed its stream and with it threw away what was there
            arrivals.close()
            # Credit for these was given when they left the inbox.
            self._waiting.extendleft((arrival, _nothing) for arrival in reversed(unread))

    def _fill(self) -> None:
        """Move arrivals into the stream while it has room."""
        while self._waiting and self._stream is not None:
            arrival, taken = self._waiting[0]
            try:
                self._stream.send_nowait(arrival)
            except (anyio.WouldBlock, anyio.BrokenResourceError):
                return  # full, or closed by its listener: senders wait either way
            self._waiting.popleft()
            taken()


def _nothing() -> None:
    """Give no credit."""


class Outlet:
    """Changes for one watcher. Of a peer that changed more than once unseen it gets the last, and before it its loss.

    A session that ended is reported also when the next one began meanwhile: what was asked in it is never answered.
    """

    def __init__(self, now: Iterable[SessionChange]) -> None:
        self._unseen: OrderedDict[tuple[Identity, bool], SessionChange] = OrderedDict(
            ((change.peer, False), change) for change in now
        )
        self._filled = anyio.Event()
        self.overrun: bool = False

    def put(self, change: SessionChange) -> None:
        """Add a change."""
        lost = change.state == "lost"
        self._unseen.pop((change.peer, False), None)
        if lost:
            self._unseen.pop((change.peer, True), None)
        self._unseen[change.peer, lost] = change
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
