"""Makes plans: geometry once for each kind of move, then one column of senders for each replica. Pure.

A replica's senders are chosen from nothing but the geometry and its seat, never from what other replicas got. Since
each replica alone is balanced their sum is, and whoever joins or leaves changes nothing for the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncfabric.weights.balance import choose
from asyncfabric.weights.boxes import Ints
from asyncfabric.weights.coverage import check_written_once, region_sizes
from asyncfabric.weights.geometry import Pieces, cut_pieces, join_pieces
from asyncfabric.weights.placement import Placement
from asyncfabric.weights.plan import Kind, Plan, Relay, Replica
from asyncfabric.weights.relay import Rates, choose_relay, heads
from asyncfabric.weights.target import SCALE_SUFFIX, Move

CHUNK_BYTES = 4 << 20
"""Pieces write about this much at most: large tensors can be shared out among senders, and pipelines flow."""


def plan_weights(
    moves: Sequence[Move],
    *,
    trainers: int,
    receivers: int,
    replicas: Sequence[str],
    relay: Relay | Rates | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Plan:
    """Return the plan that brings every parameter into every replica.

    Args:
        moves: what goes where. Placements and targets that are equal are best the same objects.
        trainers: ranks of the trainer.
        receivers: ranks of one replica; all replicas are laid out alike.
        replicas: their names, in the order of their seats.
        relay: who forwards; Rates lets the plan decide by the time that the slowest port needs; None: nobody.
        chunk_bytes: about the most that one piece writes.

    Raises:
        ValueError: a rank is out of range, a byte of a replica would be written twice or never, or blocks are cut.
    """
    if trainers < 1 or receivers < 1 or chunk_bytes < 1:
        raise ValueError(f"trainers, receivers, chunk_bytes must be 1 or more: {trainers}, {receivers}, {chunk_bytes}")
    seen: set[int] = set()  # placements are shared by thousands of moves
    for move in moves:
        if id(move.source) in seen and id(move.target) in seen:
            continue
        seen.update((id(move.source), id(move.target)))
        for what, count, placement in (
            ("trainers", trainers, move.source),
            ("receivers", receivers, move.target.placement),
        ):
            if len(placement.ranks) and int(placement.ranks.max()) >= count:
                raise ValueError(f"{move.parameter}: rank {placement.ranks.max()} is not one of {count} {what}")
    check_written_once(moves)
    plan = _geometry(moves, trainers, receivers, chunk_bytes)
    if isinstance(relay, Rates):
        relay = choose_relay(plan, relay, len(replicas))
    plan = plan.with_relay(relay or Relay())
    for name in replicas:
        plan = join_replica(plan, name)
    return plan


def join_replica(plan: Plan, name: str) -> Plan:
    """Return the plan with one more replica, on the next seat; nothing changes for the others.

    Raises:
        ValueError: the name is taken.
    """
    if any(one.name == name for one in plan.replicas):
        raise ValueError(f"there is a replica {name!r} already")
    seat = max((one.seat for one in plan.replicas), default=-1) + 1
    parent = None
    if plan.relay.width and len(plan.replicas) >= plan.relay.width:
        parent = plan.replicas[-plan.relay.width].name
    return plan.with_replicas([*plan.replicas, _replica(plan, name, seat, parent)])


def seat_replicas(plan: Plan, seats: Sequence[tuple[str, int, str | None]]) -> Plan:
    """Return the plan with exactly these replicas, given (name, seat, parent) of each: what somebody else's plan has.

    Replicas that the plan has on the same seat with the same parent are taken over.

    Raises:
        ValueError: a name stands twice, or a parent is not among them before its child.
    """
    have = {(one.name, one.seat, one.parent): one for one in plan.replicas}
    known: set[str] = set()
    for name, _, parent in seats:
        if name in known or (parent is not None and parent not in known):
            raise ValueError(f"replica {name!r}: it stands twice, or its feeder {parent!r} does not stand before it")
        known.add(name)
    return plan.with_replicas([have.get(each) or _replica(plan, *each) for each in seats])


def leave_replica(plan: Plan, name: str) -> Plan:
    """Return the plan without a replica. What it fed is fed by its own feeder; nothing else changes."""
    gone = plan.replica(name)
    rest = [
        one if one.parent != name else _replica(plan, one.name, one.seat, gone.parent)
        for one in plan.replicas
        if one is not gone
    ]
    return plan.with_replicas(rest)


def _replica(plan: Plan, name: str, seat: int, parent: str | None) -> Replica:
    """Choose who sends each row to a replica."""
    receiver = plan.pieces.receiver[plan.row_piece]
    forwarder = heads(plan, seat)
    direct = np.flatnonzero(forwarder == receiver)
    pieces = plan.row_piece[direct]
    senders = plan.trainers + forwarder
    if parent is None:
        weights = plan.piece_bytes[pieces]
        senders[direct] = choose(plan.groups, plan.piece_group[pieces], weights, plan.trainers, seat)
    else:
        senders[direct] = plan.trainers + plan.receivers + receiver[direct]
    return Replica(name, seat, parent, senders.astype(np.int32))


def _geometry(moves: Sequence[Move], trainers: int, receivers: int, chunk_bytes: int) -> Plan:
    kinds: list[Kind] = []
    sources: list[Placement] = []
    parts: list[Pieces] = []
    piece_groups: list[Ints] = []
    groups: dict[tuple[int, ...], int] = {}
    kind_of: dict[tuple[bytes, bytes, str, str, int], int] = {}
    source_of: dict[bytes, int] = {}
    parameters: dict[str, int] = {}
    regions: dict[str, int] = {}
    columns = np.zeros((4, len(moves)), np.int64)
    first = 0
    for number, move in enumerate(moves):
        key = (move.source.digest, move.target.digest, move.dtype, move.to, move.block)
        kind = kind_of.get(key)
        if kind is None:
            kind = kind_of[key] = len(kinds)
            source = source_of.setdefault(move.source.digest, len(sources))
            if source == len(sources):
                sources.append(move.source)
            part = cut_pieces(move, chunk_bytes)
            kinds.append(Kind(move.dtype, move.to, move.block, source, first, len(part)))
            numbers = [groups.setdefault(holders, len(groups)) for holders in move.source.cells.holders]
            piece_groups.append(np.array(numbers, np.int64)[part.cell])
            parts.append(part)
            first += len(part)
        scales = regions.setdefault(move.region + SCALE_SUFFIX, len(regions)) if move.block else -1
        columns[:, number] = (
            kind,
            parameters.setdefault(move.parameter, len(parameters)),
            regions.setdefault(move.region, len(regions)),
            scales,
        )
    if not moves:
        raise ValueError("there is nothing to move: the list of moves is empty")
    dims = max(2, *(len(source.shape) for source in sources))
    return Plan(
        trainers, receivers, tuple(parameters), tuple(regions), tuple(kinds), tuple(sources), join_pieces(parts, dims),
        tuple(groups), np.concatenate(piece_groups), columns[0], columns[1], columns[2], columns[3],
        region_sizes(moves, regions),
    )  # fmt: skip
