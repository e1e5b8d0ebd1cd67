"""Transfer: one submitted op; awaitable by any number of tasks, any number of times.

Runs on the event loop's thread; AnyTransfer also under the lock of a fabric of threads (`asyncfabric.blocking`). An
awaited transfer ends only when nothing can touch the caller's memory any more (INV-2): the waiting and draining are
those of `Pending`, here is what a transfer knows about itself and how it fails.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from asyncfabric._api.checks import checked_iterable
from asyncfabric._bridge import faults
from asyncfabric._bridge.engine import EngineStatusError
from asyncfabric._bridge.pending import Pending
from asyncfabric.types import TransferResult, Waiting

if TYPE_CHECKING:
    from asyncfabric._bridge.dispatcher import CompletionDispatcher

_RAILS: dict[int, tuple[int, ...]] = {0: ()}


class AnyTransfer(Pending):
    """What a transfer knows about itself, however its end is waited for."""

    __slots__ = ("_result", "_total", "_what", "_where", "op")

    op: int

    def __init__(self, dispatcher: CompletionDispatcher, what: str, where: object, total: int) -> None:
        """Not for users: `where` is what the op uses (region, key, peers), kept alive by the transfer."""
        super().__init__(dispatcher)
        self._result: TransferResult | None = None
        self._what = what
        self._where = where
        self._total = total
        self.op = 0

    @property
    def done(self) -> bool:
        """Whether the transfer has ended, well or badly."""
        if self.completion is not None:
            return True
        if not self.abandoned:
            self._dispatcher.drain()
        return self.ended

    @property
    def bytes(self) -> int:
        """Bytes that left for certain so far; final once `done`.

        Of a transfer that failed these are the bytes whose arrival its rails have confirmed: more may have left, and
        what is not known is not counted.
        """
        completion = self.completion
        if completion is not None:
            return completion.bytes
        return self._progress()

    @property
    def total_bytes(self) -> int:
        """Bytes that the transfer is to move."""
        return self._total

    def cancel(self) -> None:
        """Stop posting what is not posted; what is posted drains. Harmless when the transfer has ended.

        Whoever waits for the transfer gets TransferError with the number of bytes that had left for certain, or
        the result when everything was posted already.
        """
        if self.ended or self._dispatcher.closed:
            return
        self._dispatcher.check_thread()
        try:
            self._dispatcher.engine.cancel(self.op)
        except EngineStatusError:
            pass  # it has ended, and its completion waits in the ring

    def result(self) -> TransferResult:
        """Return the result of a transfer that is `done`, or raise its error.

        Raises:
            BusyError: it is not done yet.
            TransferError, PeerError, DeviceError, StaleKeyError: as from waiting for it.
        """
        completion = self.completion
        if completion is None:
            if self.abandoned:
                raise faults.closed(f"the fabric of this {self._what}")
            raise faults.not_ended(self.describe())
        if completion.code:
            call = faults.FailedCall(self.describe(), self._peer_name(completion.peer), completion.bytes, self._total)
            raise faults.failed(completion, call, self._reason(completion.cookie))
        if self._result is None:
            rails = _RAILS.get(completion.rails)
            if rails is None:
                rails = _RAILS[completion.rails] = tuple(i for i in range(64) if completion.rails >> i & 1)
            self._result = TransferResult(completion.bytes, completion.duration_ns * 1e-9, rails)
        return self._result

    def describe(self) -> str:
        """Return the op and its objects in words."""
        return faults.in_words(self._what, self._total, self._where)

    def waiting(self) -> list[Waiting]:
        """Return the line of this transfer, also when no task awaits it."""
        if self.ended:
            return []
        progress = self._dispatcher.engine.progress(self.op)
        names = (self._dispatcher.peer_name(progress.peer),) if progress.peer else ()
        goal = "bytes to be posted" if progress.bytes_posted < self._total else "the last work requests"
        detail = {"outstanding": progress.outstanding, "awaiting_tasks": len(self.waiters)}
        since = min((waiter.since for waiter in self.waiters), default=0.0)
        return [Waiting(self.describe(), goal, progress.bytes_posted, self._total, names, since, detail)]

    def _progress(self) -> int:
        if self._dispatcher.closed or not self.op:
            return 0
        try:
            return self._dispatcher.engine.progress(self.op).bytes_done
        except EngineStatusError:
            return 0  # another thread closed the fabric

    def _reason(self, cookie: int) -> str:
        try:
            return "" if self._dispatcher.closed else self._dispatcher.engine.reason(cookie)
        except EngineStatusError:
            return ""  # another thread closed the fabric

    def _peer_name(self, peer: int) -> str:
        return self._dispatcher.peer_name(peer)

    def __repr__(self) -> str:
        state = "pending" if not self.ended else "done" if self.completion and not self.completion.code else "failed"
        return f"<Transfer {state}: {self.describe()}>"


TransferT = TypeVar("TransferT", bound=AnyTransfer)


class Transfer(AnyTransfer):
    """One submitted transfer, made by the calls of Fabric.

    Awaiting gives a TransferResult, or raises TransferError, PeerError, DeviceError or StaleKeyError. Awaiting is
    optional: the fabric drains what nobody awaited when it closes, and keeps the buffers alive until then.

    Cancellation: when its last awaiting task is cancelled, the transfer stops posting what is not posted, drains what
    is, and only then lets the cancellation go on; see `bytes` for what had left. Awaiting a transfer that has ended
    checks for a pending cancellation but does not let other tasks run.
    """

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, TransferResult]:
        """Wait for the end of the transfer and return its result."""
        dispatcher = self._dispatcher
        if self.completion is None:
            dispatcher.drain()
        if self.completion is None:
            yield from self.settle().__await__()
        else:
            yield from dispatcher.checkpoint().__await__()
        return self._result or self.result()

    def interrupted(self) -> None:
        """The last awaiting task was cancelled: ask the engine to stop (INV-2)."""
        self.cancel()


async def wait_all(transfers: Iterable[Transfer]) -> list[TransferResult]:
    """Wait until every transfer has ended and return their results in order.

    Raises:
        TypeError: something else than transfers; then nothing was waited for.
        TransferError, PeerError, DeviceError, StaleKeyError: the first failure in the order given, when all have ended.

    Cancellation: as if each transfer had been awaited: those that no other task awaits are cancelled, all are drained,
    then the cancellation goes on.
    """
    if isinstance(transfers, Transfer):
        raise TypeError("wait_all() takes a list of transfers; one is awaited by itself")
    everything = list(checked_iterable("transfers", transfers, "transfers"))
    for transfer in everything:
        if not isinstance(transfer, Transfer):
            raise TypeError(f"wait_all() takes Transfers of a fabric, got {type(transfer).__name__} {transfer!r}")
    for position, transfer in enumerate(everything):
        if transfer.done:
            continue
        waiter = transfer.park()
        try:
            await transfer._dispatcher.adapter.wait(waiter)
        except GeneratorExit:
            raise
        except BaseException:
            waiter.leaving = True
            # All are cancelled before the first is drained, or the rest would go on being posted meanwhile.
            rest = [other for other in everything[position:] if not other.ended]
            for other in rest:
                if all(task.leaving for task in other.waiters):
                    other.cancel()
            for other in rest:
                await other.settle_shielded()
            raise
    if everything:
        await everything[-1]._dispatcher.checkpoint()
    return [transfer.result() for transfer in everything]
