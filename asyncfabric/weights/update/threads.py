"""Work that would keep the event loop: conversions and hashes on a few threads that let go of the GIL."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

THREADS = 2
"""In one process at once. A machine runs several processes, and memory is the limit soon."""

_limiter: RunVar[anyio.CapacityLimiter] = RunVar("asyncfabric.weights.update.threads")


async def in_thread(work: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
    """Run a function on a worker thread and return its result.

    Cancellation: waits until the function has returned, since it may be reading or writing memory; then it goes on.
    """
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(THREADS)
        _limiter.set(limiter)
    return await anyio.to_thread.run_sync(work, *arguments, limiter=limiter)
