"""Refusal: what a receiver does while the coordinator refuses it: names the difference, and rests ever longer.

Runs on the event loop's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio

from asyncfabric.weights.commit.messages import Difference
from asyncfabric.weights.outline import Outline
from asyncfabric.weights.plan import Plan
from asyncfabric.weights.update.backoff import Backoff
from asyncfabric.weights.update.messages import Refused

logger: logging.Logger = logging.getLogger("asyncfabric.weights")


class Refusal:
    """Of one receiver.

    Attributes:
        reason: why the coordinator does not take it, empty while it does.
        differs: the first part in which the plans differ, once both outlines were compared.
    """

    def __init__(self, name: str, plan: Plan, report: Callable[[], None]) -> None:
        """Call `report` when the receiver is to report its state again."""
        self.reason: str = ""
        self.differs: Difference | None = None
        self._name = name
        self._outline = Outline(plan)
        self._report = report
        self._backoff = Backoff()
        self._rest = anyio.CancelScope()

    def session_began(self) -> None:
        """A coordinator is there, the same one or another: what was refused before may be taken."""
        self._rest.cancel()
        self.reason, self.differs = "", None
        self._backoff.reset()

    def accepted(self) -> None:
        """The coordinator lets this receiver take part."""
        self.reason = ""

    async def take(self, refused: Refused) -> None:
        """Report the difference at once, and after that the same state again after a rest.

        Cancellation: only the rest ends.
        """
        if refused.reason != self.reason:
            logger.warning("the coordinator refuses %s: %s", self._name, refused.reason)
            self.reason = refused.reason
        if refused.outline and self.differs is None:
            part = self._outline.difference(refused.outline)
            self.differs = Difference(part, self._outline.text(part))
            self._report()
            return
        self._rest.cancel()
        with anyio.CancelScope() as self._rest:
            await anyio.sleep(self._backoff.next_s())
            self._report()
