"""Work that would keep the event loop: conversions and hashes on a few threads that let go of the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

Result = TypeVar("Result")

Arguments = TypeVarTuple("Arguments")

CORES_OF_A_THREAD, MOST_THREADS = 4, 8
"""A machine runs several processes, and memory is the limit soon."""

_limiter: RunVar[anyio.CapacityLimiter] = RunVar("asyncfabric.weights.threads")


def threads() -> int:
    """Return how many threads of this process work for updates at once: 2 to 8, by the cores that it may use."""
    return min(max(len(os.sched_getaffinity(0)) // CORES_OF_A_THREAD, 2), MOST_THREADS)


def ways() -> int:
    """Return how many pieces of one kind of work are worth a thread at once: the others are for what else there is."""
    return threads() // 2


async def in_thread(work: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
    """Run a function on a worker thread and return its result.

    Cancellation: waits until the function has returned, since it may be reading or writing memory, and returns its
    result; the next checkpoint raises.
    """
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(threads())
        _limiter.set(limiter)
    return await anyio.to_thread.run_sync(work, *arguments, limiter=limiter)
