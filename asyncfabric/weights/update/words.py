"""Words: messages on their way out, sent in order by one task, so that who says something need not wait for it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from asyncfabric import FabricError
from asyncfabric.weights.update.line import Line
from asyncfabric.weights.update.messages import WeightMessage
from asyncfabric.weights.update.messenger import Messenger

logger: logging.Logger = logging.getLogger("asyncfabric.weights")

Unsaid = Callable[[str, WeightMessage, FabricError], None]


class Words:
    """What one participant says."""

    def __init__(self, messenger: Messenger, who: str, unsaid: Unsaid | None = None) -> None:
        """Say it as `who`; `unsaid` is told of what somebody did not get."""
        self._messenger = messenger
        self._who = who
        self._unsaid = unsaid
        self._line: Line[tuple[str, WeightMessage]] = Line()

    def say(self, to: str, message: WeightMessage) -> None:
        """Put a message into the line."""
        self._line.put_nowait((to, message))

    async def run(self) -> None:
        """Send what is in the line, for ever. What cannot be sent is logged: the loss of its reader is heard of.

        Cancellation: what was not sent is not sent.
        """
        async for to, message in self._line:
            try:
                await self._messenger.send(to, message)
            except FabricError as error:
                logger.info("%s did not get %s of %s: %s", to, type(message).__name__, self._who, error)
                if self._unsaid is not None:
                    self._unsaid(to, message, error)
