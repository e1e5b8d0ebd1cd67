"""LoopCaller: how a worker thread that runs a model asks the event loop for the halves of a step.

On worker threads; the halves run on the event loop's thread. Knows nothing of what they do.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.from_thread

Result = TypeVar("Result")


class LoopCaller:
    """Runs coroutines on the event loop's thread and blocks the calling thread until they end."""

    def __init__(self, portal: anyio.from_thread.BlockingPortal | None = None, patience_s: float | None = None) -> None:
        """Reach the loop through a portal, or, without one, from worker threads that anyio started.

        Args:
            portal: of the loop; None: callers are on threads of `anyio.to_thread.run_sync`.
            patience_s: seconds that one call may take, besides the cancel scopes around the thread; None: no limit.
        """
        self.portal = portal
        self.patience_s = patience_s

    def call(self, half: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Run a coroutine function on the loop's thread and return what it returns.

        Raises:
            RuntimeError: called on the event loop's thread, or without a portal on a thread that anyio did not start.
            TimeoutError: it took longer than `patience_s`, where the coroutine does not raise something better.
        """
        call = partial(self.patiently, half)
        if self.portal is not None:
            return self.portal.call(call)
        try:
            anyio.from_thread.check_cancelled()
        except RuntimeError as error:
            raise RuntimeError(
                "the exchange is reached from a worker thread: `await anyio.to_thread.run_sync(model, ...)`, or give a"
                " portal, or `await block.forward_async(...)`"
            ) from error
        return anyio.from_thread.run(call)

    async def patiently(self, half: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Await a coroutine function on the loop's thread, for at most `patience_s`.

        Cancellation: that of the coroutine.
        """
        if self.patience_s is None:
            return await half()
        with anyio.fail_after(self.patience_s):
            return await half()
