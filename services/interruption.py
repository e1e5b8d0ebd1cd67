"""Runs the work of a command until it is done, fails, or SIGINT or SIGTERM ends it in good order."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

Result = TypeVar("Result")


async def run_interruptible(work: Callable[[], Awaitable[Result]]) -> tuple[Result | None, signal.Signals | None]:
    """Return what `work` returned, or None, and the first signal that came meanwhile, or None.

    Cancellation: ends the work. So does a signal; both return or raise only when the work has ended. What the work
    raises arrives in an exception group.
    """
    caught: list[signal.Signals] = []
    result: Result | None = None

    async def watch_signals() -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for number in signals:
                caught.append(signal.Signals(number))
                nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_signals)
        result = await work()
        nursery.cancel_scope.cancel()
    return result, caught[0] if caught else None


def first_failure(error: BaseException) -> BaseException:
    """Return the first exception in a group, however deep."""
    return first_failure(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
