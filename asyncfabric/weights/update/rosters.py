"""Rosters: which replicas take part in a version, as the coordinator says, and the plan that everybody makes of it."""

from __future__ import annotations

from asyncfabric.errors import RemoteProtocolError
from asyncfabric.weights.plan import Plan, Relay
from asyncfabric.weights.planner import seat_replicas
from asyncfabric.weights.update.messages import Roster, Seat


class RosterPlans:
    """The plans of one participant: geometry that stays, replicas that come and go.

    Attributes:
        geometry: the digest of the plan without replicas: the manifest of each version.
    """

    def __init__(self, plan: Plan) -> None:
        """Begin with a plan; whether its receivers may forward is taken from it, its replicas do not matter."""
        self.geometry: str = plan.with_replicas(()).digest
        self._relaying = plan
        self._direct = plan if plan.relay == Relay() else plan.with_relay(Relay())

    def plan(self, roster: Roster) -> Plan:
        """Return the plan of a roster.

        Raises RemoteProtocolError when it is another one than the coordinator's.
        """
        known = self._relaying if roster.relay else self._direct
        seats = [(seat.name, seat.seat, seat.parent or None) for seat in roster.replicas]
        plan = known
        if seats != [(one.name, one.seat, one.parent) for one in known.replicas]:
            try:
                plan = seat_replicas(known, seats)
            except ValueError as error:
                raise RemoteProtocolError(f"the roster of version {roster.version} makes no plan: {error}") from error
        if plan.digest != roster.plan:
            raise RemoteProtocolError(
                f"the plan of version {roster.version} is {plan.digest} here and {roster.plan} at the coordinator",
                remedy="all participants must be given the same moves and the same chunk_bytes",
            )
        if roster.relay:
            self._relaying = plan
        else:
            self._direct = plan
        return plan


def roster_of(plan: Plan, version: int, relay: bool) -> Roster:
    """Return the roster of a plan."""
    seats = [Seat(one.name, one.seat, one.parent or "") for one in plan.replicas]
    return Roster(version, plan.digest, relay, seats)
