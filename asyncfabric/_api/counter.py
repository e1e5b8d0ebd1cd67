"""ImmCounter: how many logical arrivals came for one immediate value (INV-1); tasks wait for it, threads spin on it.

Runs on the event loop's thread, except `spin` and `value`, which any thread may call; AnyCounter also under the lock of
a fabric of threads. One arming in the engine stands for all waiting tasks: the lowest target among them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from time import monotonic_ns
from typing import TYPE_CHECKING, Protocol, Self, SupportsIndex, TypeVar

from asyncfabric._api.checks import checked_index, checked_iterable
from asyncfabric._api.peer import Peer, PeerGroup
from asyncfabric._api.streams import first_gpu, stream_device, stream_handle
from asyncfabric._bridge import faults
from asyncfabric._bridge.engine import Completion, EngineStatusError
from asyncfabric._bridge.faults import closed_meanwhile
from asyncfabric._bridge.loop_adapter import Waiter
from asyncfabric.errors import ClosedError
from asyncfabric.types import Waiting

if TYPE_CHECKING:
    from types import TracebackType

    from asyncfabric._bridge.dispatcher import CompletionDispatcher

MAX_TARGET = (1 << 63) - 1


class CountWaiter(Waiter):
    """A task that waits for a count; `peers` are those whose loss ends the wait."""

    __slots__ = ("peers", "target", "value")

    def __init__(self, target: int, peers: tuple[Peer, ...]) -> None:
        super().__init__()
        self.target = target
        self.peers = peers
        self.value: int = 0  # of the counter when it was enough


class AnyCounter:
    """What a counter does, however its waits wait."""

    __slots__ = ("__weakref__", "_armed_target", "_closed", "_cookie", "_dispatcher", "_id", "_imm", "_waiters")

    def __init__(self, dispatcher: CompletionDispatcher, counter_id: int, imm: int) -> None:
        """Not for users: use `fabric.counter()`."""
        self._dispatcher = dispatcher
        self._id = counter_id
        self._imm = imm
        self._cookie = dispatcher.next_cookie()
        self._waiters: list[CountWaiter] = []
        self._armed_target = 0
        self._closed = False

    @property
    def imm(self) -> int:
        """The immediate value that peers put into their writes."""
        return self._imm

    @property
    def value(self) -> int:
        """Arrivals so far. Raises ClosedError after `close()`."""
        dispatcher = self._dispatcher
        if self._closed or dispatcher.closed:
            raise faults.closed(repr(self))
        try:
            return dispatcher.engine.counter_value(self._id)
        except EngineStatusError as error:
            with closed_meanwhile(self):
                raise error

    @property
    def waiters(self) -> tuple[CountWaiter, ...]:
        """Tasks that wait now."""
        return tuple(self._waiters)

    def spin(self, target: SupportsIndex, deadline: float) -> int:
        """Return the value once it is at least `target`; for threads without an event loop.

        Spins with the GIL released: the lowest latency, at the price of a whole core. Any thread may call it, also
        several at once.

        Args:
            target: the count to wait for, 0 or more.
            deadline: seconds from now.

        Raises:
            TransferError: the deadline passed.
            ClosedError: the counter or the fabric is closed, also when that happens during the spin.
        """
        goal = checked_target(target)
        if not 0 <= deadline <= 1e9:
            raise ValueError(f"deadline must be in 0..1e9 seconds, got {deadline!r}")
        self._check_open()
        try:
            return self._dispatcher.engine.spin_counter(self._id, goal, monotonic_ns() + round(deadline * 1e9))
        except EngineStatusError as error:
            call = faults.FailedCall(f"spinning on {self!r} for {goal} arrivals, {deadline:g} s")
            raise faults.refused(error, call) from None

    def stream_wait(self, stream: object, target: SupportsIndex) -> None:
        """Make a CUDA stream wait until the value is at least `target`; returns at once, also inside a graph capture.

        What is given to the stream afterwards sees the bytes of those arrivals. The stream waits as long as it takes:
        after losing a peer, `close()` lets it go on.

        Args:
            stream: a torch.cuda.Stream, or the handle of a stream of the first GPU of this fabric.
            target: the count to wait for, 0 or more.

        Raises:
            TypeError, ValueError: not a stream, or a bad target.
            TransferError: no rail of this fabric drives the stream's GPU, or the driver refused.
            BusyError: too many counters have a flag.
            ClosedError: the counter or the fabric is closed.
        """
        goal = checked_target(target)
        handle = stream_handle(stream)
        self._dispatcher.check_thread()
        self._check_open()
        engine = self._dispatcher.engine
        try:
            engine.stream_wait(self._id, handle, stream_device(stream, first_gpu(engine.rails())), goal)
        except EngineStatusError as error:
            raise faults.refused(error, faults.FailedCall(f"a stream waiting for {goal} of {self!r}")) from None

    @property
    def flag_address(self) -> int:
        """Address of 8 bytes that hold the value, or the largest int64 once the counter is closed.

        For kernels to spin on: host memory that GPUs of this fabric reach at the same address. Read it as volatile, or
        with acquire semantics.
        """
        self._check_open()
        try:
            return self._dispatcher.engine.counter_flag(self._id)
        except EngineStatusError as error:
            raise faults.refused(error, faults.FailedCall(f"the flag of {self!r}")) from None

    def close(self) -> None:
        """Stop counting; idempotent. Later arrivals are stale, they never reach the next counter of this `imm`."""
        if self._closed:
            return
        self._dispatcher.check_thread()
        self._closed = True
        self._dispatcher.parked.pop(self._cookie, None)
        if not self._dispatcher.closed:
            self._dispatcher.engine.close_counter(self._id)
        self.abandon()

    def complete(self, completion: Completion) -> None:
        """The engine reports that the armed target was reached: wake whose target that is, arm for the next one."""
        self._armed_target = 0
        self._settle(completion.value)
        if not self._armed_target:
            self._dispatcher.parked.pop(self._cookie, None)

    def abandon(self) -> None:
        """Wake everybody with ClosedError."""
        self._dispatcher.peer_listeners.pop(self._cookie, None)
        for waiter in self._waiters:
            waiter.error = faults.closed(repr(self))
            self._dispatcher.adapter.wake(waiter)
        self._waiters = []

    def waiting(self) -> list[Waiting]:
        """Return a line for each waiting task; `missing_from` are the peers that it declared."""
        have = self._dispatcher.engine.counter_value(self._id)
        what = f"wait({self!r})"
        goal, detail = f"arrivals of imm {self._imm}", {"imm": self._imm}
        return [
            Waiting(what, goal, have, one.target, tuple(map(repr, one.peers)), one.since, detail)
            for one in self._waiters
        ]

    async def _wait(self, target: int, peers: tuple[Peer, ...]) -> int:
        dispatcher = self._dispatcher
        dispatcher.check_loop()
        dispatcher.drain()  # a loss that is known by now must not be missed below
        waiter = CountWaiter(target, peers)
        if peers:
            # With many peers, asking the engine about each would cost more than the wait.
            lost = next((peer for peer in peers if peer._gone and peer.lost), None)
            if lost is not None and dispatcher.engine.counter_value(self._id) < target:
                raise self._loss(lost, target, None)
            dispatcher.peer_listeners[self._cookie] = self._peer_lost
        self._waiters.append(waiter)
        try:
            if not self._armed_target or target < self._armed_target:
                self._arm(target)
            await dispatcher.adapter.wait(waiter)
        finally:
            if not waiter.ready:
                self._waiters.remove(waiter)
        if waiter.error is not None:
            raise waiter.error
        if self._closed or dispatcher.closed:  # since then: nobody is left to ask
            return waiter.value
        return dispatcher.engine.counter_value(self._id)

    def _arm(self, target: int) -> None:
        dispatcher = self._dispatcher
        dispatcher.parked[self._cookie] = self
        self._armed_target = target
        try:
            dispatcher.engine.arm_counter(self._id, self._cookie, target)
        except EngineStatusError as error:
            raise faults.refused(error, faults.FailedCall(f"waiting for {self!r}")) from None

    def _settle(self, value: int) -> None:
        left: list[CountWaiter] = []
        for waiter in self._waiters:
            if waiter.target <= value:
                waiter.value = value
                self._dispatcher.adapter.wake(waiter)
            else:
                left.append(waiter)
        self._waiters = left
        if left:
            target = min(waiter.target for waiter in left)
            if target != self._armed_target:
                self._arm(target)
        else:
            self._dispatcher.peer_listeners.pop(self._cookie, None)

    def _peer_lost(self, completion: Completion) -> None:
        """A peer is lost: whoever waits for it fails by name, unless what it had sent before was enough."""
        value = self._dispatcher.engine.counter_value(self._id)
        for waiter in self._waiters:
            lost = next((peer for peer in waiter.peers if peer.id == completion.value), None)
            if lost is not None and waiter.target > value:
                waiter.error = self._loss(lost, waiter.target, completion)
                self._dispatcher.adapter.wake(waiter)
        self._waiters = [waiter for waiter in self._waiters if not waiter.ready]
        self._settle(value)

    def _loss(self, peer: Peer, target: int, completion: Completion | None) -> Exception:
        have = self._dispatcher.engine.counter_value(self._id)
        return faults.peer_lost(f"{self!r} has {have} of {target} arrivals", repr(peer), completion)

    def _check_open(self) -> None:
        if self._closed or self._dispatcher.closed:
            raise faults.closed(repr(self))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ImmCounter {self._imm}{', closed' if self._closed else ''}>"


CounterT = TypeVar("CounterT", bound=AnyCounter)


class ImmCounter(AnyCounter):
    """Counts the arrivals that peers named with `imm`, made by `fabric.counter()`. The value only grows.

    A write is worth 1, however many rails carried it; n pages are worth n; a scatter, a signal and a barrier are worth
    1 at each target. What arrived before the counter was made is counted. Once a wait for n returned, the bytes of
    those n arrivals are visible.
    """

    __slots__ = ()

    async def wait(self, target: SupportsIndex, peers: Iterable[Peer] | PeerGroup | None = None) -> int:
        """Return the value once it is at least `target`.

        Args:
            target: the count to wait for, 0 or more.
            peers: peers that the arrivals come from; losing one of them before the target is reached ends the wait.

        Raises:
            TypeError, ValueError: a bad target, or peers that are not of this fabric.
            PeerError: one of `peers` is lost; it names the peer.
            ClosedError: the counter or the fabric is closed, also when that happens during the wait.

        Cancellation: only this wait ends; the counter goes on counting. A target that is already reached checks for a
        pending cancellation but does not let other tasks run.
        """
        goal = target if type(target) is int and 0 <= target <= MAX_TARGET else checked_target(target)
        dispatcher = self._dispatcher
        if self._closed or dispatcher.closed:
            raise faults.closed(repr(self))
        value = dispatcher.engine.counter_value(self._id)
        if value >= goal:
            await dispatcher.checkpoint()
            return value
        return await self._wait(goal, checked_peers(dispatcher, peers) if peers is not None else ())

    def __aiter__(self) -> AsyncIterator[int]:
        """Yield the value each time it grew, coalesced, from what is there on; ends when the counter is closed."""
        return CountProgress(self)


class Awaited(Protocol):
    """A counter whose waits are awaited."""

    _closed: bool

    async def wait(self, target: SupportsIndex) -> int:
        """Return the value once it is at least `target`.

        Cancellation: only this wait ends.
        """


class CountProgress:
    """One `async for value in counter`."""

    __slots__ = ("_counter", "_seen")

    def __init__(self, counter: Awaited) -> None:
        self._counter = counter
        self._seen = 0

    def __aiter__(self) -> CountProgress:
        return self

    async def __anext__(self) -> int:
        """Return the next value; ends the loop when the counter was closed.

        Cancellation: nothing is lost; the next loop begins with the value of then.
        """
        counter = self._counter
        if counter._closed:
            raise StopAsyncIteration
        try:
            self._seen = await counter.wait(self._seen + 1)
        except ClosedError:
            if counter._closed:
                raise StopAsyncIteration from None
            raise
        return self._seen


def checked_target(target: SupportsIndex) -> int:
    """Return a count to wait for; raises TypeError or ValueError."""
    return checked_index("target", target, 0, MAX_TARGET)


def checked_peers(dispatcher: CompletionDispatcher, peers: Iterable[Peer] | PeerGroup) -> tuple[Peer, ...]:
    """Return the peers that a wait names; raises TypeError or ValueError for those of no or another fabric."""
    if isinstance(peers, Peer):
        raise TypeError(f"peers must be a list of Peer objects or a PeerGroup, got the one {peers!r}")
    named = tuple(checked_iterable("peers", peers, "Peer objects"))
    for peer in named:
        if not isinstance(peer, Peer):
            raise TypeError(f"peers must be Peer objects from `await fabric.connect(...)`, got {type(peer).__name__}")
        if peer._dispatcher is not dispatcher:
            raise ValueError(f"{peer!r} belongs to another fabric of this process, so its loss is not reported here")
    return named
