"""Runs an async example of a property under trio: virtual time, and the order of runnable tasks from a drawn seed."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import hypothesis
import trio
import trio.testing
from trio._core import _run as scheduler

# trio shuffles each batch of runnable tasks. With these two, the shuffle is a function of the seed alone.
scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True
hypothesis.register_random(scheduler._r)


class TaskCensus(trio.abc.Instrument):
    """Which tasks live now."""

    def __init__(self) -> None:
        self.tasks: set[trio.lowlevel.Task] = set()

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        self.tasks.add(task)

    def task_exited(self, task: trio.lowlevel.Task) -> None:
        self.tasks.discard(task)


def run_example(seed: int, example: Callable[[TaskCensus], Awaitable[None]]) -> None:
    """Run one example; a hang ends when virtual time is over, which is at once."""
    census = TaskCensus()

    async def bounded() -> None:
        with trio.move_on_after(10_000) as patience:
            await example(census)
        assert not patience.cancelled_caught, "the example hangs"

    scheduler._r.seed(seed)
    trio.run(bounded, clock=trio.testing.MockClock(autojump_threshold=0), instruments=[census])


def dice(seed: int) -> random.Random:
    """Return the example's own dice, apart from the scheduler's."""
    return random.Random(seed)
