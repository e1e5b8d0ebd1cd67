"""Admission: which receivers a coordinator lets take part: those whose plan is its own. Pure.

A receiver with another plan could not make the plan of any version, so each version that it took part in would be
aborted, and its memory does not fit what it would fetch from the others.
"""

from __future__ import annotations

import logging

from asyncfabric.weights.commit.messages import Standing
from asyncfabric.weights.outline import Outline
from asyncfabric.weights.plan import Plan
from asyncfabric.weights.update.messages import Refused

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
        self._outline = Outline(plan)

    def judge(self, name: str, standing: Standing) -> Refused | None:
        """Return the answer to a receiver that has another plan, None for one that takes part."""
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
        if self.refused.get(name) != reason:
            logger.warning("%s takes part in no update: %s", name, reason)
            self.refused[name] = reason
        return Refused(self.manifest, reason[:2000], b"" if differs is not None else self._outline.hashes)

    def forget(self, name: str) -> None:
        """Forget a receiver that has gone."""
        self.refused.pop(name, None)


def _shown(text: str) -> str:
    """Return another process's text without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
