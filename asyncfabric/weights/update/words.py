"""Words: messages on their way out, in order for each who hears them, so that who says something need not wait.

Runs on the event loop's thread. What is said to many goes side by side: who cannot be reached soon keeps nobody else
from hearing it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import anyio
from anyio.abc import TaskGroup

from asyncfabric import FabricError
from asyncfabric.weights.update.messages import WeightMessage
from asyncfabric.weights.update.messenger import Messenger

logger: logging.Logger = logging.getLogger("asyncfabric.weights")

SPEAKERS = 64
"""So many are spoken to at the same time, by tasks that stay: a task for each message costs more than the message."""

Unsaid = Callable[[str, WeightMessage, FabricError], None]


class Words:
    """What one participant says."""

    def __init__(
        self, messenger: Messenger, who: str, unsaid: Unsaid | None = None, quiet: Callable[[], None] | None = None
    ) -> None:
        """Say it as `who`; `unsaid` is told of what somebody did not get, `quiet` when all that was said has left."""
        self._messenger = messenger
        self._who = who
        self._unsaid = unsaid
        self._quiet = quiet
        self._waiting: dict[str, deque[WeightMessage]] = {}  # who is in it is spoken to, or will be
        self._next: deque[str] = deque()  # of them those whom nobody speaks to yet
        self._idle: list[anyio.Event] = []
        self._speakers = 0
        self._tasks: TaskGroup | None = None
        self._ended = False

    def say(self, to: str, message: WeightMessage) -> None:
        """Put a message behind what else is said to the same one; once `run` has ended it is dropped."""
        if self._ended:
            return
        if (waiting := self._waiting.get(to)) is not None:
            waiting.append(message)
            return
        self._waiting[to] = deque([message])
        self._next.append(to)
        self._wake()

    async def run(self) -> None:
        """Send what is said, for ever. What cannot be sent is logged: the loss of its reader is heard of.

        Cancellation: what was not sent is not sent.
        """
        async with anyio.create_task_group() as self._tasks:
            for _ in range(len(self._next)):  # was said before
                self._wake()
            try:
                await anyio.sleep_forever()
            finally:
                self._ended = True

    def _wake(self) -> None:
        if self._idle:
            self._idle.pop().set()
        elif self._tasks is not None and self._speakers < SPEAKERS:
            self._speakers += 1
            self._tasks.start_soon(self._speak)

    async def _speak(self) -> None:
        while True:
            while self._next:
                await self._tell(self._next.popleft())
            event = anyio.Event()
            self._idle.append(event)
            await event.wait()

    async def _tell(self, to: str) -> None:
        waiting = self._waiting[to]
        while waiting:
            message = waiting.popleft()
            try:
                await self._messenger.send(to, message)
            except FabricError as error:
                logger.info("%s did not get %s of %s: %s", to, type(message).__name__, self._who, error)
                if self._unsaid is not None:
                    self._unsaid(to, message, error)
        del self._waiting[to]
        if not self._waiting and self._quiet is not None:
            self._quiet()
