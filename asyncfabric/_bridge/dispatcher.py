"""The completion dispatcher: takes completions off the engine's ring and wakes exactly the tasks that wait for them.

Runs on the event loop's thread only; for threads without a loop, under the lock of `threads.ThreadDispatcher`. A
cookie names who parked: a transfer, a control call, a counter. What a completion means is decided by its sink; how a
task sleeps is decided by the event-loop adapter. Nothing polls and no task of its own runs here: the ring is drained by
whoever waits, and by every call that might find its answer there already.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import count
from math import inf
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

from asyncfabric._bridge import faults
from asyncfabric._bridge.engine import Completion, CompletionKind, Engine
from asyncfabric._bridge.forking import close_in_children
from asyncfabric._bridge.loop_adapter import EventLoopAdapter, Waiter
from asyncfabric._bridge.running_loop import open_adapter
from asyncfabric.types import Waiting

if TYPE_CHECKING:
    from asyncfabric._bridge.opened_key import OpenedKey
    from asyncfabric._bridge.pending import Pending

_BATCH = 256
_COUNTER, _WATCH = int(CompletionKind.COUNTER), int(CompletionKind.WATCH)
_PEER_LOST = int(CompletionKind.PEER_LOST)
_MESSAGE = int(CompletionKind.MESSAGE)


def _oldest_first(line: Waiting) -> float:
    return line.since or inf


def _nameless(peer: int) -> str:
    return f"peer {peer}" if peer else ""


def _ignored(peer: int) -> None:
    """Nobody has names for peers."""


class Sink(Protocol):
    """Whoever a completion is for."""

    def complete(self, completion: Completion) -> None:
        """Take the completion and wake who waits for it; must not raise.

        An interrupt may end it between two lines; then it is called again with the same completion.
        """

    def abandon(self) -> None:
        """The fabric is closed and no completion will come: wake everybody with ClosedError; must not raise."""

    def waiting(self) -> list[Waiting]:
        """Return a line for each wait, for `fabric.why()`."""


class CompletionDispatcher:
    """Parks tasks by cookie and pumps completions.

    Attributes:
        parked: sinks by cookie; an op's entry keeps its buffers alive until its completion came.
        opened_keys: keys by their bytes, while somebody uses them.
        dropped_keys: engine ids of keys that nobody uses, closed at the next safe moment (finalizers may run anywhere).
        thread: that of the event loop, the only one whose calls are taken; 0: those of all are. See check_thread.
        regions: the record of every registered region, and so the owner of its memory, by id, until it is released.
        releases: releases in flight, by region.
        questions: what the engine answers once for all who ask meanwhile, by what is asked, so that waits which are
            given up and begun again leave one each.
        message_waiters, peer_listeners: who waits for messages and for losses of peers.
        peer_name: a peer's number in words. peer_lost: gets the number of one that is lost, before anybody is woken.
        draining: True inside drain().
        closing, closed: no new calls; the engine is gone. `ending` is what later closers wait for.
    """

    unclosed = "a fabric was never closed: leave its `async with open_fabric()`, or await fabric.aclose()"

    def __init__(self, engine: Engine) -> None:
        self.closed: bool = True  # until it is whole
        self.engine: Engine = engine
        self.thread: int = get_ident()
        self.parked: dict[int, Sink] = {}
        self.next_cookie: Callable[[], int] = count(1).__next__
        self.opened_keys: WeakValueDictionary[bytes, OpenedKey] = WeakValueDictionary()
        self.dropped_keys: deque[int] = deque()
        self.regions: dict[int, Any] = {}
        self.releases: dict[int, Any] = {}
        self.peer_name: Callable[[int], str] = _nameless
        self.peer_lost: Callable[[int], None] = _ignored
        self.draining: bool = False
        self.closing: bool = False
        self.ending: Pending | None = None
        self.questions: dict[object, Any] = {}
        self.message_waiters: list[Waiter] = []
        self.peer_listeners: dict[object, Callable[[Completion], None]] = {}
        self._batches: Iterator[list[Completion]] = iter(partial(engine.poll, _BATCH), None)
        self.adapter: EventLoopAdapter = self._open_adapter()
        self.checkpoint: Callable[[], Awaitable[None]] = self.adapter.checkpoint
        close_in_children(self)
        self.closed = False

    def __del__(self) -> None:
        if not self.closed:
            warnings.warn(self.unclosed, ResourceWarning, stacklevel=2, source=self)

    def check_thread(self) -> None:
        """Raise RuntimeError in another thread than the event loop's. The first line of a call that does not wait."""
        if get_ident() != self.thread:
            raise faults.another_loop()

    def check_loop(self) -> None:
        """Raise RuntimeError in another event loop too. The first line of a call that waits."""
        if get_ident() != self.thread or not self.adapter.is_here():
            raise faults.another_loop()

    def drain(self) -> None:
        """Take every completion that is there and hand it to its sink. Never waits.

        Raises:
            RuntimeError: in another thread than the event loop's.
        """
        if self.closed or self.draining:
            return
        if get_ident() != self.thread:
            raise faults.another_loop()
        self.dispatch()

    def dispatch(self) -> None:
        """Hand out every completion that is there; the body of drain().

        Ctrl-C may come between any two lines; it is raised when everything is delivered, or others would wait for ever.
        Until then a batch is delivered once more from the first: sinks do not mind.
        """
        self.draining = True
        interrupt: KeyboardInterrupt | None = None
        try:
            parked = self.parked
            for batch in self._batches:  # an iterator in C: nothing comes between taking off the ring and keeping
                while True:
                    try:
                        for completion in batch:
                            cookie, kind = completion[0], completion[1]
                            if cookie in parked:
                                parked[cookie].complete(completion)
                                if kind < _COUNTER or kind > _WATCH:  # those may be armed again by now
                                    del parked[cookie]
                            elif kind == _MESSAGE:
                                self._wake_message_waiters()
                            elif kind == _PEER_LOST:
                                self.opened_keys.clear()  # a key of it that comes now is opened anew
                                self.peer_lost(completion[5])
                                for listener in tuple(self.peer_listeners.values()):
                                    listener(completion)
                        break
                    except KeyboardInterrupt as thrown:
                        interrupt = thrown
                if len(batch) < _BATCH:
                    break
        finally:
            self.draining = False
        if interrupt is not None:
            raise interrupt

    def flush_dropped_keys(self) -> None:
        """Close the keys whose last user is gone."""
        dropped = self.dropped_keys
        for _ in range(len(dropped)):
            try:
                key = dropped.popleft()
            except IndexError:
                return  # another thread took it
            self.engine.close_key(key)

    def waiting(self) -> list[Waiting]:
        """Return a line for each wait of this fabric, oldest first."""
        if self.closed:  # in the child of a fork the waits of the parent are still parked
            return []
        self.drain()
        lines = [line for sink in tuple(self.parked.values()) for line in sink.waiting()]
        lines += [Waiting("messages()", "a message", 0, 1, since=waiter.since) for waiter in self.message_waiters]
        return sorted(lines, key=_oldest_first)

    def shut(self) -> None:
        """Close the engine; then everybody who still waits is woken with ClosedError, when nothing moves any more."""
        self.drain()
        self.closed = True
        self.adapter.close()
        self.engine.close()
        sinks = list(self.parked.values())
        self.parked.clear()
        for sink in sinks:
            sink.abandon()
        self._wake_message_waiters()

    def close_in_child(self) -> None:
        """Mark it as closed: this process is a forked copy, which has none of the engine's threads."""
        self.closing = self.closed = True

    def _open_adapter(self) -> EventLoopAdapter:
        return open_adapter(self)

    def _wake_message_waiters(self) -> None:
        for waiter in self.message_waiters:
            self.adapter.wake(waiter)
        self.message_waiters = []
