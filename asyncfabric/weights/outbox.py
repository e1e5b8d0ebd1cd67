"""Outbox and batching interval: messages out, in order for each recipient; messages in, several with one wake-up.

Runs on the event loop's thread. Messages to many recipients go side by side: one that cannot be reached soon delays no
other. Waking up costs an event loop more than taking a message: a few occasional ones are taken at once, and
hundreds of steady senders at a steady interval.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup

from asyncfabric import FabricError
from asyncfabric.weights.channel import Messenger
from asyncfabric.weights.messages import WeightMessage
from asyncfabric.weights.threads import ways

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

    async def send(self, to: str, message: WeightMessage) -> None:
        """Put a message behind the others, for callers that await a `Send`.

        Cancellation: it does not wait.
        """
        self.say(to, message)

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


Heard = TypeVar("Heard")

BEATS_PER_S = 250.0
"""Of a receiver, which has until the end of the update to check."""

QUICK_BEATS_PER_S = 1000.0
"""Of a coordinator, for whom everybody waits; and of a receiver with cores for it, whose few senders write for tens of
milliseconds: the last of what they say would wait for four of them."""

FEW_SENDERS = 16
"""So many do not talk all the time."""

BEATS_AT_ONCE = 16
"""So many times somebody may be heard without a rest after a silence."""

IDLE_BEATS = 8
"""So many times in a row it is worth looking whether something was said, before waiting for it: who waits is woken by
every write that arrives, on rails that do not tell writes and words apart."""


def receiving_beats(senders: int) -> float:
    """Return how many beats a second a receiver has for so many senders."""
    return QUICK_BEATS_PER_S if senders <= FEW_SENDERS and ways() > 1 else BEATS_PER_S


class Pace:
    """A bucket of beats: one for each time that something was heard; it fills as time goes by.

    Attributes:
        beats_per_s: how fast.
    """

    def __init__(self, beats_per_s: float = BEATS_PER_S) -> None:
        """Begin with a full bucket."""
        self.beats_per_s: float = beats_per_s
        self._beats = float(BEATS_AT_ONCE)
        self._since = monotonic()

    async def listen(self, take_nowait: Callable[[], list[Heard]]) -> list[Heard]:
        """Take a beat, and return what was said when there was one: nothing, where waiting for it is better.

        Cancellation: only this wait ends; nothing is lost.
        """
        now = monotonic()
        self._beats = min(float(BEATS_AT_ONCE), self._beats + (now - self._since) * self.beats_per_s) - 1.0
        self._since = now
        if self._beats >= 0:
            return []
        await anyio.sleep(-self._beats / self.beats_per_s)
        for _ in range(IDLE_BEATS):
            if found := take_nowait():
                return found
            await anyio.sleep(1 / self.beats_per_s)
        return []
