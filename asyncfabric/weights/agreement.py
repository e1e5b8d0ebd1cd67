"""Agreement: the replicas of a version, the one plan that all participants make of it, and where two plans differ.

Pure. The coordinator lists the replicas in a roster; each participant makes the plan and compares digests. Outlines
find the first part in which the plan of a refused receiver is another one.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from hashlib import blake2b

import numpy as np

from asyncfabric.errors import RemoteProtocolError
from asyncfabric.weights.messages import Roster, Seat
from asyncfabric.weights.plan.assignment import seat_replicas
from asyncfabric.weights.plan.geometry import Pieces
from asyncfabric.weights.plan.parts import Relay
from asyncfabric.weights.plan.plan import Plan

HASH_BYTES = 8

MOST_PARTS = 1 << 17
"""Parts that are compared: a megabyte of hashes."""


class Outline:
    """The parts of one plan: numbers of ranks, the relay, then its moves in order. Replicas do not matter."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._header = (
            f"{plan.trainers} trainers",
            f"{plan.receivers} receivers in each replica",
            f"relay {plan.relay.width} wide inside nodes of {plan.relay.node_ranks} ranks",
        )

    def __len__(self) -> int:
        return min(len(self._header) + len(self._plan.move_kind), MOST_PARTS)

    @cached_property
    def hashes(self) -> bytes:
        """HASH_BYTES for each part."""
        plan, found = self._plan, [_hash(text.encode()) for text in self._header]
        lengths = self._lengths
        for move in range(len(self) - len(found)):
            region, scales = int(plan.move_region[move]), int(plan.move_scales[move])
            names = f"{plan.parameters[plan.move_parameter[move]]}\0{plan.regions[region]}\0"
            if scales >= 0:
                names += plan.regions[scales]
            found.append(
                _hash(names.encode(), self._kinds[plan.move_kind[move]], lengths[region], lengths.get(scales, b""))
            )
        return b"".join(found)

    def text(self, part: int) -> str:
        """Return what a part is, in a line; also for a part that is not there."""
        if part < len(self._header):
            return self._header[part]
        if part >= len(self):
            return "no further tensor"
        plan, move = self._plan, part - len(self._header)
        name, region = plan.parameters[plan.move_parameter[move]], plan.move_region[move]
        kind = plan.kinds[plan.move_kind[move]]
        source, rows = plan.sources[kind.source], slice(kind.first, kind.first + kind.count)
        receivers = sorted(set(plan.pieces.receiver[rows].tolist()))
        first = f", {source.sizes[0].tolist()} by rank {source.ranks[0]}" if len(source.ranks) else ""
        lengths = plan.sizes.length_bytes[plan.sizes.region == region].tolist()
        blocks = f" in blocks of {kind.block}" if kind.block else ""
        return (
            f"{name!r}, {kind.dtype} {source.shape} held by {len(source.ranks)} trainers{first}; it goes to "
            f"{plan.regions[region]!r}, {lengths[:4]} bytes of {kind.to}{blocks}, in {kind.count} pieces for receivers "
            f"{receivers[:8]}"
        )[:700]

    def difference(self, hashes: bytes) -> int:
        """Return the first part in which a plan of these hashes differs; the number of parts where none does."""
        own = self.hashes
        for at in range(0, len(own), HASH_BYTES):
            if own[at : at + HASH_BYTES] != hashes[at : at + HASH_BYTES]:
                return at // HASH_BYTES
        return len(self)

    @cached_property
    def _kinds(self) -> list[bytes]:
        plan, found = self._plan, []
        for kind in plan.kinds:
            rows = slice(kind.first, kind.first + kind.count)
            columns = [
                np.ascontiguousarray(getattr(plan.pieces, field.name)[rows], "<i8").tobytes()
                for field in fields(Pieces)
            ]
            placed = plan.sources[kind.source].digest
            found.append(_hash(f"{kind.dtype} {kind.to} {kind.block} {kind.count}".encode(), placed, *columns))
        return found

    @cached_property
    def _lengths(self) -> dict[int, bytes]:
        """By tensor, its receivers and its bytes at each of them."""
        found: dict[int, bytes] = {}
        for region, receiver, length in zip(*(column.tolist() for column in self._plan.sizes), strict=True):
            found[region] = found.get(region, b"") + f"{receiver}:{length} ".encode()
        return found


def _hash(*parts: bytes) -> bytes:
    content = blake2b(digest_size=HASH_BYTES)
    for part in parts:
        content.update(len(part).to_bytes(8, "little"))
        content.update(part)
    return content.digest()


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
