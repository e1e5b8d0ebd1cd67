"""Where tasks park: what the completion dispatcher asks of an event loop. `running_loop` chooses the adapter.

Everything here runs on the event loop's thread. Two implementations: `trio_adapter` and `asyncio_adapter`; they use the
loops' own primitives instead of anyio's, because one anyio.Event per transfer would cost more than the transfer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any, Protocol, TypeVar

_Result = TypeVar("_Result")

PATIENCE = 32
"""How many calls in a row may find their answer ready before other tasks get their turn; a power of two."""


class Waiter:
    """One parked task: `ready` is set before it is woken; `handle` belongs to the event-loop adapter.

    `leaving` marks a task that was cancelled and only waits for the drain, so it no longer wants the result.
    """

    __slots__ = ("error", "handle", "leaving", "ready", "since")

    def __init__(self) -> None:
        self.ready: bool = False
        self.handle: Any = None
        self.leaving: bool = False
        self.error: BaseException | None = None
        self.since: float = monotonic()


def is_ready(waiter: Waiter) -> bool:
    """Return `waiter.ready` anew: type checkers do not see that draining may have set it since the last look."""
    return waiter.ready


class EventLoopAdapter(Protocol):
    """One event loop, seen from the completion dispatcher."""

    def is_here(self) -> bool:
        """Return whether the calling task runs in this event loop."""

    def checkpoint(self) -> Awaitable[None]:
        """Raise the cancellation that is pending for the calling task, for a call that need not wait.

        Mostly returns without a switch of tasks, which would cost more than the call; each `PATIENCE`-th time it lets
        others run, since deadlines only pass when the event loop runs.
        """

    async def wait(self, waiter: Waiter) -> None:
        """Return when `waiter.ready`; raises the loop's cancellation, whatever `ready` returns by then."""

    async def wait_shielded(self, waiter: Waiter) -> BaseException | None:
        """Return when `waiter.ready` whatever is thrown in meanwhile; returns the last interruption."""

    def wake(self, waiter: Waiter) -> None:
        """Set `ready` and let the task of the waiter run; harmless when it does not wait any more."""

    async def uninterrupted(self, function: Callable[[], Awaitable[_Result]]) -> _Result:
        """Run `function` so that a SIGINT only interrupts it where it waits, never between two statements."""

    def close(self) -> None:
        """Stop watching the completion fd; nobody waits here any more."""
