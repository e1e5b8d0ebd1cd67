"""Parking under trio, by leader and followers: one of the waiting tasks waits for the completion fd itself.

The leader drains the ring for everybody, wakes the others, and hands the lead on when its own wait is over. A pump task
would cost each wake-up one more turn of the scheduler; with a leader, the task that is awaited for is the task that the
kernel wakes. When nobody waits nothing runs: completions stay in the ring for the next call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import trio
from trio.lowlevel import (
    checkpoint,
    checkpoint_if_cancelled,
    current_task,
    current_trio_token,
    in_trio_run,
    reschedule,
    wait_readable,
    wait_task_rescheduled,
)

from asyncfabric._bridge import faults
from asyncfabric._bridge.loop_adapter import PATIENCE, Waiter, is_ready

if TYPE_CHECKING:
    from asyncfabric._bridge.dispatcher import CompletionDispatcher

_Result = TypeVar("_Result")


class TrioAdapter:
    """Tasks of one trio run that wait for one engine. All methods run on trio's thread."""

    def __init__(self, dispatcher: CompletionDispatcher) -> None:
        self._dispatcher = dispatcher
        self._engine = dispatcher.engine
        self._fd = dispatcher.engine.completion_fd()
        self._token = current_trio_token()
        self._leader: Waiter | None = None
        self._asleep = False
        self._followers: dict[Waiter, None] = {}
        self._ready_calls = 0

    def is_here(self) -> bool:
        """Return whether the calling task is of this trio run."""
        return in_trio_run() and current_trio_token() is self._token

    def checkpoint(self) -> Awaitable[None]:
        """Raise a pending Cancelled; lets others run now and then."""
        self._ready_calls += 1
        # The caller awaits what is returned: one coroutine less for each transfer.
        turn = self._ready_calls & (PATIENCE - 1) == 0
        return checkpoint() if turn else checkpoint_if_cancelled()  # noqa: ASYNC105

    async def wait(self, waiter: Waiter) -> None:
        """Return when the waiter is ready.

        Cancellation: raises Cancelled at once; the lead, if this task had it, goes to another waiting task.
        """
        try:
            while not waiter.ready:
                if self._dispatcher.closed:
                    raise faults.closed("the fabric")
                if self._leader is None:
                    self._leader = waiter
                    try:
                        await self._lead(waiter)
                    finally:
                        self._leader = None
                else:
                    await self._follow(waiter)
        finally:
            # Also for a follower that was promoted and found itself ready: whoever leaves last with others still parked
            # must name a leader, or they would sleep for ever.
            if self._leader is None and self._followers:
                self._promote()

    async def wait_shielded(self, waiter: Waiter) -> BaseException | None:
        """Return when the waiter is ready; Ctrl-C, which ignores shields, is kept and returned."""
        interrupt: BaseException | None = None
        with trio.CancelScope(shield=True):
            while not waiter.ready:
                try:
                    await self.wait(waiter)
                except KeyboardInterrupt as thrown:
                    interrupt = thrown
        return interrupt

    def wake(self, waiter: Waiter) -> None:
        """Set the waiter ready and reschedule its task."""
        waiter.ready = True
        if waiter in self._followers:
            del self._followers[waiter]
            reschedule(waiter.handle)
        elif waiter is self._leader and self._asleep and not self._dispatcher.draining:
            # Completions ring the fd, so the leader wakes by itself; a close of its counter does not.
            trio.lowlevel.notify_closing(self._fd)

    async def uninterrupted(self, function: Callable[[], Awaitable[_Result]]) -> _Result:
        """Run `function` under trio's protection from KeyboardInterrupt."""

        @trio.lowlevel.enable_ki_protection
        async def protected() -> _Result:
            return await function()

        return await protected()

    def close(self) -> None:
        """Let trio forget the fd."""
        trio.lowlevel.notify_closing(self._fd)

    async def _lead(self, waiter: Waiter) -> None:
        dispatcher, engine = self._dispatcher, self._engine
        refusals = 0
        while not waiter.ready and not dispatcher.closed:
            if not engine.arm():
                dispatcher.drain()
                refusals += 1
                if is_ready(waiter):
                    await self.checkpoint()
                elif refusals > 1:
                    await checkpoint()  # others' completions pour in: the tasks that drain() woke must get their turn
                continue
            self._asleep = True
            try:
                await wait_readable(self._fd)
            except trio.ClosedResourceError:
                pass  # wake() of the leader; the fd itself is as good as before
            finally:
                self._asleep = False
                if not dispatcher.closed:
                    engine.disarm()
            dispatcher.drain()

    async def _follow(self, waiter: Waiter) -> None:
        waiter.handle = current_task()
        self._followers[waiter] = None

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._followers.pop(waiter, None)
            return trio.lowlevel.Abort.SUCCEEDED

        await wait_task_rescheduled(abort)

    def _promote(self) -> None:
        follower = next(iter(self._followers))
        del self._followers[follower]
        reschedule(follower.handle)
