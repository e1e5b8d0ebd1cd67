"""Refusal: a receiver that the coordinator refuses names the difference of their plans, and rests ever longer.

Runs on the event loop's thread. Rests double, up to a bound.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio

from asyncfabric.weights.agreement import Outline
from asyncfabric.weights.channel import AGAIN_S
from asyncfabric.weights.messages import Difference, Refused
from asyncfabric.weights.plan.plan import Plan

MOST_S = 5.0
"""The longest rest: what was mended elsewhere is noticed after so long."""


class Backoff:
    """Rests that double from `AGAIN_S` to `MOST_S`."""

    def __init__(self) -> None:
        self._next_s = AGAIN_S

    def next_s(self) -> float:
        """Return the seconds to rest after one more failure."""
        rest, self._next_s = self._next_s, min(2 * self._next_s, MOST_S)
        return rest

    def reset(self) -> None:
        """Begin anew, after a success."""
        self._next_s = AGAIN_S


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
