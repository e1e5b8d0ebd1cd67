"""BaseTasks: the tasks under a node, the supervisor and the link, which begin in order and end in the reverse order.

Runs on the event loop's thread. They are shielded: actors that stop, and asks that are being cancelled, still need the
link. So they are not begun with `nursery.start`, which a cancelled caller would leave only when such a task has ended.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from asyncfabric.actors.death import first_leaf


class BaseTasks:
    """Tasks in a nursery; when one fails, the nursery is cancelled and `failure` keeps why."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.failure: Exception | None = None
        self._nursery = nursery
        self._tasks: list[tuple[trio.CancelScope, trio.Event]] = []

    async def start(self, run: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        """Start a task and return when it called what it was given, or has ended.

        Cancellation: the task goes on until `aclose`.
        """
        scope, begun, ended = trio.CancelScope(shield=True), trio.Event(), trio.Event()
        self._tasks.append((scope, ended))

        async def task() -> None:
            try:
                with scope:
                    await run(begun.set)
            except Exception as error:
                first = first_leaf(error)
                self.failure = self.failure or (first if isinstance(first, Exception) else error)
                self._nursery.cancel_scope.cancel()
            finally:
                ended.set()
                begun.set()

        self._nursery.start_soon(task)
        await begun.wait()

    async def aclose(self) -> None:
        """End the tasks, the last first, and return when they have ended.

        Cancellation: shielded.
        """
        for scope, ended in reversed(self._tasks):
            scope.cancel()
            with trio.CancelScope(shield=True):
                await ended.wait()
