"""The stairwell: takes completions off the engine's ring and wakes exactly the tasks that wait for them.

Runs on the event loop's thread only. A cookie names who parked: a transfer, a control call, a counter. What a
completion means is decided by its sink; how a task sleeps is decided by the landing. Nothing polls and no task of its
own runs here: the ring is drained by whoever waits, and by every call that might find its answer there already.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import count
from math import inf
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

from asyncfabric._bridge import faults
from asyncfabric._bridge.engine import Completion, CompletionKind, Engine
from asyncfabric._bridge.forking import close_in_children
from asyncfabric._bridge.landing import Landing, Waiter, open_landing
from asyncfabric.types import Waiting

if TYPE_CHECKING:
    from asyncfabric._bridge.opened_key import OpenedKey
    from asyncfabric._bridge.pending import Pending

_BATCH = 256
_PEER_LOST = int(CompletionKind.PEER_LOST)
_MESSAGE = int(CompletionKind.MESSAGE)


def _oldest_first(line: Waiting) -> float:
    return line.since or inf


def _nameless(peer: int) -> str:
    return f"peer {peer}" if peer else ""


def _unheard(peer: int) -> None:
    """Nobody has names for peers."""


class Sink(Protocol):
    """Whoever a completion is for."""

    def complete(self, completion: Completion) -> None:
        """Take the completion and wake who waits for it; must not raise."""

    def abandon(self) -> None:
        """The fabric is closed and no completion will come: wake everybody with ClosedError; must not raise."""

    def waiting(self) -> list[Waiting]:
        """Return a line for each wait, for `fabric.why()`."""


class Stairwell:
    """Parks tasks by cookie and pumps completions.

    Attributes:
        parked: sinks by cookie; an op's entry keeps its buffers alive until its completion came.
        opened_keys: keys by their bytes, while somebody uses them.
        dropped_keys: engine ids of keys that nobody uses, closed at the next safe moment (finalizers may run anywhere).
        thread: that of the event loop, the only one whose calls are taken; see check_thread.
        regions: the record of every registered region, and so the owner of its memory, by id, until it is released.
        releases: releases in flight, by region.
        message_waiters, peer_listeners: who wants to hear of messages and of lost peers.
        peer_name: a peer's number in words. peer_lost: hears the number of one that is lost, before anybody is woken.
        draining: True inside drain().
        closing, closed: no new calls; the engine is gone. `ending` is what later closers wait for.
    """

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
        self.peer_lost: Callable[[int], None] = _unheard
        self.draining: bool = False
        self.closing: bool = False
        self.ending: Pending | None = None
        self.message_waiters: list[Waiter] = []
        self.peer_listeners: dict[object, Callable[[Completion], None]] = {}
        self._poll = engine.poll
        self.landing: Landing = open_landing(self)
        self.checkpoint: Callable[[], Awaitable[None]] = self.landing.checkpoint
        close_in_children(self)
        self.closed = False

    def __del__(self) -> None:
        if not self.closed:
            text = "a fabric was never closed: leave its `async with open_fabric()`, or await fabric.aclose()"
            warnings.warn(text, ResourceWarning, stacklevel=2, source=self)

    def check_thread(self) -> None:
        """Raise RuntimeError in another thread than the event loop's. The first line of a call that does not wait."""
        if get_ident() != self.thread:
            raise faults.another_loop()

    def check_loop(self) -> None:
        """Raise RuntimeError in another event loop too. The first line of a call that waits."""
        if get_ident() != self.thread or not self.landing.is_here():
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
        self.draining = True
        try:
            pop = self.parked.pop
            while True:
                batch = self._poll(_BATCH)
                for completion in batch:
                    sink = pop(completion[0], None)
                    if sink is not None:
                        sink.complete(completion)
                    elif completion[1] == _MESSAGE:
                        self._wake_message_waiters()
                    elif completion[1] == _PEER_LOST:
                        self.peer_lost(completion[5])
                        for listener in tuple(self.peer_listeners.values()):
                            listener(completion)
                if len(batch) < _BATCH:
                    return
        finally:
            self.draining = False

    def flush_dropped_keys(self) -> None:
        """Close the keys whose last user is gone."""
        while self.dropped_keys:
            self.engine.close_key(self.dropped_keys.popleft())

    def waiting(self) -> list[Waiting]:
        """Return a line for each wait of this fabric, oldest first."""
        self.drain()
        lines = [line for sink in tuple(self.parked.values()) for line in sink.waiting()]
        lines += [Waiting("messages()", "a message", 0, 1, since=waiter.since) for waiter in self.message_waiters]
        return sorted(lines, key=_oldest_first)

    def shut(self) -> None:
        """Forget the engine, which the caller closes then: everybody who still waits is woken with ClosedError."""
        self.drain()
        self.closed = True
        self.landing.close()
        sinks = list(self.parked.values())
        self.parked.clear()
        for sink in sinks:
            sink.abandon()
        self._wake_message_waiters()

    def _wake_message_waiters(self) -> None:
        waiters, self.message_waiters = self.message_waiters, []
        for waiter in waiters:
            self.landing.wake(waiter)
