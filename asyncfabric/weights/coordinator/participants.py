"""Participants: proposals of trainers, receivers that are admitted, and their seats in the plan.

Runs on the event loop's thread. A receiver with another plan could not make the plan of any version, so each version
that it took part in would be aborted, and its memory does not fit what it would fetch from the others. One whose name
is no receiver of any replica has no place in a plan at all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from asyncfabric.weights.agreement import Outline
from asyncfabric.weights.channel import receiver_of
from asyncfabric.weights.messages import Refused, Standing
from asyncfabric.weights.plan.assignment import join_replica, leave_replica
from asyncfabric.weights.plan.parts import Relay
from asyncfabric.weights.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Presence:
    """What the coordinator saw of a name.

    Attributes:
        found: how often somebody of this name came.
        here: whether one is there.
        sessions: how often one reported what it holds, and takes part in updates since.
    """

    found: int = 0
    here: bool = False
    sessions: int = 0


class Proposals:
    """The versions that trainers propose to write."""

    def __init__(self, trainers: Iterable[str]) -> None:
        self._trainers = frozenset(trainers)
        self._offered: dict[str, int] = {}

    def __contains__(self, trainer: str) -> bool:
        """Return whether an offer of this trainer stands."""
        return trainer in self._offered

    @property
    def agreed(self) -> int | None:
        """The version that all trainers offer, if they do."""
        if len(self._offered) < len(self._trainers):
            return None  # asked at every message while hundreds make theirs
        versions = {self._offered.get(name) for name in self._trainers}
        return versions.pop() if len(versions) == 1 else None

    @property
    def versions(self) -> set[int]:
        """The versions that are offered."""
        return set(self._offered.values())

    def make(self, trainer: str, version: int) -> None:
        """Note a proposal of a trainer of the plan; it replaces an earlier one. Others have nothing to propose."""
        if trainer in self._trainers:
            self._offered[trainer] = version

    def withdraw(self, trainer: str, version: int | None = None) -> None:
        """Forget what a trainer offers, or only if it is this version."""
        if version is None or self._offered.get(trainer) == version:
            self._offered.pop(trainer, None)

    def take_down(self, version: int) -> list[str]:
        """Forget all offers of a version; returns who had made them."""
        found = [trainer for trainer, offered in self._offered.items() if offered == version]
        for trainer in found:
            del self._offered[trainer]
        return found


class SeatAssignment:
    """The plans so far, with forwarding and without.

    Attributes:
        geometry: the digest of the plan without replicas.
    """

    def __init__(self, plan: Plan) -> None:
        """Begin with nobody there; the replicas of `plan` do not matter."""
        bare = plan.with_replicas(())
        self.geometry: str = bare.digest
        self._forwards = bare.relay != Relay()
        self._receivers = bare.receivers
        self._plans = {True: bare, False: bare.with_relay(Relay())}

    def plan(self, receivers: Iterable[str]) -> tuple[Plan, bool]:
        """Return the plan for these receivers, and whether they forward: only when every replica is whole."""
        present: dict[str, set[int]] = {}
        for name in receivers:
            replica, receiver = receiver_of(name)
            present.setdefault(replica, set()).add(receiver)
        forwards = self._forwards and all(len(have) == self._receivers for have in present.values())
        plan = self._plans[forwards]
        for one in plan.replicas:
            if one.name not in present:
                plan = leave_replica(plan, one.name)
        for name in present:
            if all(one.name != name for one in plan.replicas):
                plan = join_replica(plan, name)
        self._plans[forwards] = plan
        return plan, forwards


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
