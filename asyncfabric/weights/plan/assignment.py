"""Assignment: the rank that sends each row to a replica, for replicas that join, leave or are listed. Pure.

A replica's senders are chosen from nothing but the geometry and its seat, never from what other replicas got. Since
each replica alone is balanced their sum is, and a replica that joins or leaves changes nothing for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from asyncfabric.weights.plan.boxes import Ints
from asyncfabric.weights.plan.parts import Replica
from asyncfabric.weights.plan.plan import Plan

if TYPE_CHECKING:
    from asyncfabric.weights.plan.plan import Plan


Floats = NDArray[np.float64]

ROUNDS = 40

SETTLED = 1e-4
"""Sharing stops when a round moves less than this part of the mean load."""

FEW = 2048
"""Up to so many pieces of a group are dealt one by one, the largest first; more are cut into contiguous stretches."""


def choose(groups: Sequence[tuple[int, ...]], group_of: Ints, weights: Ints, ranks: int, turn: int = 0) -> Ints:
    """Return the rank that sends each piece.

    Args:
        groups: the ranks of each group, none twice.
        group_of: the group of each piece.
        weights: bytes of each piece.
        ranks: ranks are 0 .. ranks - 1.
        turn: rotates equally good choices, so that several callers do not all take the first rank.
    """
    sizes = np.array([len(group) for group in groups], np.int64)
    first = np.array([group[0] for group in groups], np.int64)
    chosen = first[group_of]
    open_pieces = np.flatnonzero(sizes[group_of] > 1)
    if not len(open_pieces):
        return chosen
    closed = sizes[group_of] == 1
    loads = np.bincount(chosen[closed], weights=weights[closed], minlength=ranks).astype(np.float64)
    totals = np.bincount(group_of, weights=weights, minlength=len(groups)).astype(np.float64)
    shared = [int(number) for number in np.unique(group_of[open_pieces])]
    shared.sort(key=lambda number: (sizes[number], groups[number]))
    members = {number: np.roll(np.array(groups[number]), -(turn % len(groups[number]))) for number in shared}
    quotas = _shares(shared, members, totals, loads)
    order = np.argsort(group_of[open_pieces], kind="stable")
    pieces = open_pieces[order]
    bounds = np.searchsorted(group_of[pieces], [*shared, len(groups)])
    ends = np.searchsorted(group_of[pieces], shared, side="right")
    for number, begin, end in zip(shared, bounds[:-1], ends, strict=True):
        mine = pieces[begin:end]
        deal = _deal_each if len(mine) <= FEW else _deal_stretches
        chosen[mine] = members[number][deal(weights[mine].astype(np.float64), quotas[number].copy())]
    return chosen


def _shares(shared: list[int], members: dict[int, Ints], totals: Floats, loads: Floats) -> dict[int, Floats]:
    """Return for each group the bytes that each member sends."""
    quotas = {number: np.zeros(len(members[number])) for number in shared}
    mean = (loads.sum() + sum(totals[number] for number in shared)) / max(1, len(loads))
    for _ in range(ROUNDS):
        moved = 0.0
        for number in shared:
            who = members[number]
            others = loads[who] - quotas[number]
            share = fill(others, float(totals[number]))
            moved = max(moved, float(np.abs(share - quotas[number]).max()))
            loads[who] = others + share
            quotas[number] = share
        if moved <= SETTLED * mean:
            break
    return quotas


def fill(loads: Floats, amount: float) -> Floats:
    """Return what to add to each load so that `amount` is used up and the lowest loads end at one level."""
    order = np.argsort(loads, kind="stable")
    ordered = loads[order]
    heights = (amount + np.cumsum(ordered)) / np.arange(1, len(loads) + 1)
    reached = int(np.flatnonzero(heights >= ordered)[-1])
    return np.asarray(np.maximum(heights[reached] - loads, 0.0))


def _deal_each(weights: Floats, quotas: Floats) -> Ints:
    """Give each piece, the heaviest first, to the member with the most left of its share."""
    owners = np.zeros(len(weights), np.int64)
    for piece in np.argsort(-weights, kind="stable"):
        member = int(np.argmax(quotas))
        owners[piece] = member
        quotas[member] -= weights[piece]
    return owners


def _deal_stretches(weights: Floats, quotas: Floats) -> Ints:
    """Cut the pieces, in their order, into one stretch for each member: neighbours stay together."""
    middles = np.cumsum(weights) - weights / 2
    return np.minimum(np.searchsorted(np.cumsum(quotas), middles, side="right"), len(quotas) - 1)


def imbalance(loads: Ints) -> float:
    """Return the largest load over the mean one; 1.0 when nothing is to be done."""
    mean = float(np.mean(loads)) if len(loads) else 0.0
    return float(np.max(loads)) / mean if mean else 1.0


def heads(plan: Plan, seat: int) -> Ints:
    """Return for each row the receiver of the replica that gets it from outside the node; itself when nobody forwards.

    Of the ranks of a node that want equal bytes one is the head, chosen so that all get about the same over the
    network.
    """
    pieces = plan.pieces
    receiver = pieces.receiver[plan.row_piece]
    if not plan.relay.node_ranks:
        return receiver.copy()
    members = plan.families
    family = members.leader[plan.row_piece]
    asked = np.flatnonzero(family == plan.row_piece)  # one row for each distinct box of each node
    first = plan.row_piece[asked]
    by_row = np.full(plan.rows, -1, np.int64)
    by_row[asked] = choose(members.groups, members.group[first], plan.piece_bytes[first], plan.receivers, seat)
    return np.asarray(by_row[np.arange(plan.rows) - plan.row_piece + family])


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
