"""Who of several ranks that hold the same sends it, so that all send about the same. Pure functions.

Each piece has a group: the ranks that could send it. First bytes are shared out as if they could be divided at will, by
filling up the least loaded ranks of each group to one level, again and again until nothing moves; then pieces follow
the shares. The result depends on nothing but the arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from asyncfabric.weights.boxes import Ints

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
