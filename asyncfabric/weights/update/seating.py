"""Seating: the coordinator's plan for the receivers that are there; who was there keeps its seat. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from asyncfabric.weights.plan import Plan, Relay
from asyncfabric.weights.planner import join_replica, leave_replica
from asyncfabric.weights.update.messenger import receiver_of


class Seating:
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
