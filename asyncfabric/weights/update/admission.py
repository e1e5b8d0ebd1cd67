"""Admission: which receivers a coordinator lets take part: those with a place in its plan, whose plan is its own. Pure.

A receiver with another plan could not make the plan of any version, so each version that it took part in would be
aborted, and its memory does not fit what it would fetch from the others. One whose name is no receiver of any
replica has no place in a plan at all.
"""

from __future__ import annotations

import logging

from asyncfabric.weights.commit.messages import Standing
from asyncfabric.weights.outline import Outline
from asyncfabric.weights.plan import Plan
from asyncfabric.weights.update.messages import Refused
from asyncfabric.weights.update.messenger import receiver_of

logger: logging.Logger = logging.getLogger("asyncfabric.weights")


class Admission:
    """Judges what receivers report.

    Attributes:
        manifest: the digest of the plan that they must have.
        refused: by receiver, why it takes part in nothing.
    """

    def __init__(self, plan: Plan) -> None:
        """Take those of a plan without replicas."""
        self.manifest: str = plan.digest
        self.refused: dict[str, str] = {}
        self._receivers = plan.receivers
        self._outline = Outline(plan)

    def judge(self, name: str, standing: Standing) -> Refused | None:
        """Return the answer to a receiver that has another plan or no place in one, None for one that takes part."""
        if misplaced := self._misplaced(name):
            return self._refuse(name, misplaced, b"")
        if standing.manifest == self.manifest:
            self.refused.pop(name, None)
            return None
        reason = (
            f"the plan of {name} is {_shown(standing.manifest) or 'not named'}, the coordinator's is {self.manifest}"
        )
        differs = standing.differs
        if differs is not None:
            here = self._outline.text(differs.part)
            theirs = _shown(differs.text)
            reason += (
                f"; they differ first in {here} at the coordinator, and {theirs} at {name}"
                if here != theirs
                else f"; they differ first in how a part is cut into pieces or placed: {here}"
            )
        return self._refuse(name, reason, b"" if differs is not None else self._outline.hashes)

    def forget(self, name: str) -> None:
        """Forget a receiver that has gone."""
        self.refused.pop(name, None)

    def _misplaced(self, name: str) -> str:
        """Return why a name is of no receiver that a replica of the plan has, "" when it is."""
        try:
            _, receiver = receiver_of(name)
        except ValueError as error:
            return str(error)
        there = f"replicas of the coordinator's plan have receivers 0 to {self._receivers - 1}"
        return "" if receiver < self._receivers else f"{name} is receiver {receiver}, and {there}"

    def _refuse(self, name: str, reason: str, hashes: bytes) -> Refused:
        if self.refused.get(name) != reason:
            logger.warning("%s takes part in no update: %s", name, reason)
            self.refused[name] = reason
        return Refused(self.manifest, reason[:2000], hashes)


def _shown(text: str) -> str:
    """Return another process's text without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
