"""Outbox and batching interval: messages out, in order for each recipient; messages in, several with one wake-up.

Runs on the event loop's thread. Messages to many recipients go side by side: one that cannot be reached soon delays no
other. Waking up costs an event loop more than taking a message: a few occasional ones are taken at once, and
hundreds of steady senders at a steady interval.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup

from asyncfabric import FabricError
from asyncfabric._notice import Notice
from asyncfabric.weights.channel import WeightChannel
from asyncfabric.weights.messages import WeightMessage
from asyncfabric.weights.threads import ways

logger: logging.Logger = logging.getLogger("asyncfabric.weights")

SENDING_TASKS = 64
"""Messages go to so many at the same time, by tasks that stay: a task for each message costs more than the message."""

Unsent = Callable[[str, WeightMessage, FabricError], None]


class Outbox:
    """The messages of one participant on their way out."""

    def __init__(
        self, channel: WeightChannel, who: str, unsent: Unsent | None = None, quiet: Callable[[], None] | None = None
    ) -> None:
        """Send as `who`; `unsent` is called with each message that was not sent, `quiet` when all have left."""
        self._channel = channel
        self._who = who
        self._unsent = unsent
        self._quiet = quiet
        self._waiting: dict[str, deque[WeightMessage]] = {}  # by recipient; a task sends to each, or will
        self._next: deque[str] = deque()  # of them those that no task sends to yet
        self._idle: list[anyio.Event] = []
        self._sending = 0
        self._tasks: TaskGroup | None = None
        self._ended = False
        self._left = Notice()

    def put(self, to: str, message: WeightMessage) -> None:
        """Put a message behind the others to the same recipient; once `run` has ended it is dropped."""
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
        self.put(to, message)

    async def wait_sent(self, recipients: Iterable[str]) -> None:
        """Return when nothing that was put for these recipients waits any more; each message was sent or logged.

        Cancellation: only this wait ends.
        """
        names = set(recipients)
        while names & self._waiting.keys() and not self._ended:
            await self._left.wait()

    async def run(self) -> None:
        """Send for ever. A message that cannot be sent is logged: the loss of its reader is reported elsewhere.

        Cancellation: what was not sent is not sent.
        """
        async with anyio.create_task_group() as self._tasks:
            for _ in range(len(self._next)):  # put before this ran
                self._wake()
            try:
                await anyio.sleep_forever()
            finally:
                self._ended = True
                self._left.notify()

    def _wake(self) -> None:
        if self._idle:
            self._idle.pop().set()
        elif self._tasks is not None and self._sending < SENDING_TASKS:
            self._sending += 1
            self._tasks.start_soon(self._send_all)

    async def _send_all(self) -> None:
        while True:
            while self._next:
                await self._send_waiting(self._next.popleft())
            event = anyio.Event()
            self._idle.append(event)
            await event.wait()

    async def _send_waiting(self, to: str) -> None:
        waiting = self._waiting[to]
        while waiting:
            message = waiting.popleft()
            try:
                await self._channel.send(to, message)
            except FabricError as error:
                logger.info("%s did not get %s of %s: %s", to, type(message).__name__, self._who, error)
                if self._unsent is not None:
                    self._unsent(to, message, error)
        del self._waiting[to]
        self._left.notify()
        if not self._waiting and self._quiet is not None:
            self._quiet()


Taken = TypeVar("Taken")

BATCHES_PER_S = 250.0
"""Of a receiver, which has until the end of the update to check."""

QUICK_BATCHES_PER_S = 1000.0
"""Of a coordinator, for whom everybody waits; and of a receiver with cores for it, whose few senders write for tens of
milliseconds: their last reports would wait for four of them."""

FEW_SENDERS = 16
"""So many do not talk all the time."""

BATCHES_AT_ONCE = 16
"""So many batches may be taken without a rest after a silence."""

IDLE_BATCHES = 8
"""So many times in a row it is worth looking for a message, before waiting for one: a waiting task is woken by
every write that arrives, on rails that do not distinguish writes and messages."""


def receiving_rate(senders: int) -> float:
    """Return how many beats a second a receiver has for so many senders."""
    return QUICK_BATCHES_PER_S if senders <= FEW_SENDERS and ways() > 1 else BATCHES_PER_S


class BatchingInterval:
    """A bucket of batches: one for each time that messages were taken; it fills as time goes by.

    Attributes:
        batches_per_s: how fast.
    """

    def __init__(self, batches_per_s: float = BATCHES_PER_S) -> None:
        """Begin with a full bucket."""
        self.batches_per_s: float = batches_per_s
        self._batches = float(BATCHES_AT_ONCE)
        self._since = monotonic()

    async def gather(self, take_nowait: Callable[[], list[Taken]]) -> list[Taken]:
        """Take a batch from the bucket; return the messages that came meanwhile: none where waiting is better.

        Cancellation: only this wait ends; nothing is lost.
        """
        now = monotonic()
        self._batches = min(float(BATCHES_AT_ONCE), self._batches + (now - self._since) * self.batches_per_s) - 1.0
        self._since = now
        if self._batches >= 0:
            return []
        await anyio.sleep(-self._batches / self.batches_per_s)
        for _ in range(IDLE_BATCHES):
            if found := take_nowait():
                return found
            await anyio.sleep(1 / self.batches_per_s)
        return []
