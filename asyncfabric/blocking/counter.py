"""ImmCounter of a blocking fabric: how many logical arrivals came for one immediate value (INV-1); threads wait for it.

Any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, SupportsIndex

from asyncfabric._api.counter import MAX_TARGET, AnyCounter, checked_peers, checked_target
from asyncfabric._api.peer import Peer, PeerGroup
from asyncfabric._bridge import faults
from asyncfabric._bridge.engine import EngineStatusError
from asyncfabric.blocking.deadlines import until
from asyncfabric.errors import ClosedError

if TYPE_CHECKING:
    from asyncfabric._bridge.threads import ThreadDispatcher


class ImmCounter(AnyCounter):
    """Counts the arrivals that peers named with `imm`, made by `fabric.counter()`. The value only grows.

    A write is worth 1, however many rails carried it; n pages are worth n; a scatter, a signal and a barrier are worth
    1 at each target. What arrived before the counter was made is counted. Once a wait for n returned, the bytes of
    those n arrivals are visible.
    """

    __slots__ = ()

    _dispatcher: ThreadDispatcher

    @property
    def value(self) -> int:
        """Arrivals so far; a look brings on what is under way. Raises ClosedError after `close()`."""
        if not (self._closed or self._dispatcher.closed):
            self._dispatcher.assist()
        return self.counted

    @property
    def counted(self) -> int:
        """Arrivals that are known so far. Unlike `value` it brings nothing on. Raises ClosedError after `close()`."""
        dispatcher = self._dispatcher
        if self._closed or dispatcher.closed:
            raise faults.closed(repr(self))
        try:
            return dispatcher.engine.counter_value(self._id)
        except EngineStatusError:  # another thread closes it, or the fabric
            raise faults.closed(repr(self)) from None

    def wait(
        self,
        target: SupportsIndex,
        peers: Iterable[Peer] | PeerGroup | None = None,
        *,
        deadline: float | None = None,
    ) -> int:
        """Block until the value is at least `target` and return it.

        Args:
            target: the count to wait for, 0 or more.
            peers: peers that the arrivals come from; losing one of them before the target is reached ends the wait.
            deadline: seconds from now; None waits as long as it takes.

        Raises:
            TypeError, ValueError: a bad target or deadline, or peers that are not of this fabric.
            TimeoutError: the deadline passed; the counter goes on counting.
            PeerError: one of `peers` is lost; it names the peer.
            ClosedError: the counter or the fabric is closed, also when that happens during the wait.
        """
        goal = target if type(target) is int and 0 <= target <= MAX_TARGET else checked_target(target)
        limit = until(deadline)
        dispatcher = self._dispatcher
        if self._closed or dispatcher.closed:
            raise faults.closed(repr(self))
        try:
            value = dispatcher.engine.counter_value(self._id)
        except EngineStatusError:  # another thread closes the fabric
            raise faults.closed(repr(self)) from None
        if value >= goal:
            return value
        named = checked_peers(dispatcher, peers) if peers is not None else ()
        try:
            return dispatcher.run(self._wait(goal, named), limit)
        except TimeoutError:
            raise TimeoutError(f"{self!r} has {self.value} of {goal} arrivals after {deadline:g} s") from None

    def close(self) -> None:
        """Stop counting; idempotent. Later arrivals are stale, they never reach the next counter of this `imm`.

        Threads that wait for it get ClosedError.
        """
        with self._dispatcher.lock:
            super().close()

    def __iter__(self) -> Iterator[int]:
        """Yield the value each time it grew, coalesced, from what is there on; ends when the counter is closed."""
        seen = 0
        while not self._closed:
            try:
                seen = self.wait(seen + 1)
            except ClosedError:
                if self._closed:
                    return
                raise
            yield seen
