"""A completion that will come once and that any number of tasks may wait for: the base of transfers and control calls.

Runs on the event loop's thread, or under the lock of a fabric of threads. Here stands the waiting half of INV-2:
`settle()` does not return, whatever is thrown at the task, before the completion is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncfabric._bridge.engine import Completion
from asyncfabric._bridge.loop_adapter import Waiter
from asyncfabric.types import Waiting

if TYPE_CHECKING:
    from asyncfabric._bridge.dispatcher import CompletionDispatcher


class Pending:
    """One call whose end is one completion. `abandoned`: the fabric was closed before it came."""

    __slots__ = ("__weakref__", "_dispatcher", "_waiters", "abandoned", "completion")

    def __init__(self, dispatcher: CompletionDispatcher) -> None:
        self._dispatcher = dispatcher
        self._waiters: list[Waiter] | None = None
        self.completion: Completion | None = None
        self.abandoned: bool = False

    def complete(self, completion: Completion) -> None:
        """Keep the completion and wake every waiting task."""
        self.completion = completion
        if self._waiters:
            self._wake_all()

    def abandon(self) -> None:
        """Note that no completion will come and wake every waiting task."""
        self.abandoned = True
        if self._waiters:
            self._wake_all()

    @property
    def ended(self) -> bool:
        """Whether the completion came, as far as the ring was drained."""
        return self.completion is not None or self.abandoned

    @property
    def waiters(self) -> tuple[Waiter, ...]:
        """Tasks that wait now."""
        return tuple(self._waiters or ())

    def waiting(self) -> list[Waiting]:
        """Return a line for each waiting task, for `fabric.why()`."""
        return [Waiting(self.describe(), "an answer of the engine", 0, 1, since=one.since) for one in self.waiters]

    def describe(self) -> str:
        """Return the call in words."""
        return "closing the fabric"

    async def settle(self) -> None:
        """Return when the completion is there.

        Cancellation: `interrupted()` is called if no other task still wants the result; then the wait goes on,
        shielded, and the cancellation is raised only when the completion came.
        """
        if self.ended:
            await self._dispatcher.checkpoint()
            return
        waiter = self.park()
        adapter = self._dispatcher.adapter
        try:
            await adapter.wait(waiter)
        except GeneratorExit:
            raise  # the event loop is gone and closes what it left behind: nobody can wait here any more
        except BaseException:
            if not self.ended:
                waiter.leaving = True
                if all(other.leaving for other in self.waiters):
                    self.interrupted()
                await self._settle_shielded(waiter)
            raise

    async def settle_shielded(self) -> BaseException | None:
        """Return when the completion is there; returns the interruption that came meanwhile instead of raising it.

        Cancellation: shielded; bounded by the deadlines of the engine.
        """
        if self.ended:
            return None
        return await self._dispatcher.adapter.wait_shielded(self.park())

    async def settle_unless_interrupted(self) -> None:
        """Return when the completion is there.

        Cancellation: the call goes on; only the wait for it ends.
        """
        if self.ended:
            return
        waiter = self.park()
        try:
            await self._dispatcher.adapter.wait(waiter)
        except BaseException:
            self.leave(waiter)
            raise

    def interrupted(self) -> None:
        """The last task that wanted the result was cancelled."""

    def park(self) -> Waiter:
        """Return a new waiter that is woken at the end; the caller waits for it at the event-loop adapter.

        Raises:
            RuntimeError: in another thread or event loop than the fabric's.
        """
        self._dispatcher.check_loop()
        waiter = Waiter()
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(waiter)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Forget a waiter that gave up; the call goes on."""
        if self._waiters and waiter in self._waiters:
            self._waiters.remove(waiter)

    async def _settle_shielded(self, waiter: Waiter) -> None:
        waiter.ready = False
        interrupt = await self._dispatcher.adapter.wait_shielded(waiter)
        if isinstance(interrupt, KeyboardInterrupt):
            raise interrupt

    def _wake_all(self) -> None:
        for waiter in self._waiters or ():
            self._dispatcher.adapter.wake(waiter)
        self._waiters = None
