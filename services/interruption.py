"""Runs the work of a command until it is done, fails, or SIGINT or SIGTERM ends it in good order."""

from __future__ import annotations

import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import trio

from asyncfabric.errors import BrokenError
from asyncfabric_services.exits import CHECK_FAILED, FINE

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


Kinds = type[Exception] | tuple[type[Exception], ...]


@contextmanager
def failing_as(*rules: tuple[Kinds, Callable[[BaseException], BaseException]]) -> Iterator[None]:
    """Raise another exception for failures of some kinds, bare or in the groups that nurseries make.

    Not by `raise` within `except*`, which puts what is raised into a group again before Python 3.11.4.

    Args:
        rules: kinds, and what the first failure becomes if all failures are of them; the first that fits counts.
    """
    try:
        yield
    except Exception as error:
        for kinds, become in rules:
            failure = _failure_of(error, kinds)
            if failure is not None:
                raise become(failure) from None
        raise


def _failure_of(error: Exception, kinds: Kinds) -> BaseException | None:
    if not isinstance(error, ExceptionGroup):
        return error if isinstance(error, kinds) else None
    found, rest = error.split(kinds)
    return first_failure(found) if found is not None and rest is None else None


async def guarded(work: Callable[[], Awaitable[Result]]) -> tuple[Result | None, int]:
    """Return what `work` returned and 0; or None and the exit status, when it broke or was interrupted.

    Then a line on standard error reports why.

    Cancellation: ends the work.
    """
    failure: BaseException | None = None
    result: Result | None = None
    caught: signal.Signals | None = None
    try:
        result, caught = await run_interruptible(work)
    except* BrokenError as group:
        failure = first_failure(group)
    if failure is not None:
        print(failure, file=sys.stderr)
        return None, CHECK_FAILED
    if result is None and caught is not None:
        print(f"interrupted by {caught.name}", file=sys.stderr)
        return None, 128 + caught
    return result, FINE
