"""The rule for quantisation blocks that shards cut: maxima travel, weights do not (WT-2). Pure functions.

A scale needs the largest value of the whole block. Where a block lies in several shards each holder works out the
maximum of its part and sends that one number to the others; then all divide by the same scale and the result is bit
for bit that of quantising the whole tensor. Gathering the block at one owner would move up to 32 KiB for each four
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from asyncfabric.weights.boxes import Ints, intersect
from asyncfabric.weights.formats import BLOCK
from asyncfabric.weights.placement import Placement


class Shares(NamedTuple):
    """Columns: rank `to` needs, from rank `source`, the maxima of the parts of blocks in this box of the parameter."""

    to: Ints
    source: Ints
    starts: Ints
    sizes: Ints


def shares(placement: Placement) -> Shares:
    """Return who tells whom maxima of a parameter that is quantised, ordered by `to`.

    Every holder of a cut block is told, also one that sends nothing: copies of a shard ask each their own neighbours.

    Raises:
        ValueError: a part of a cut block is held by nobody.
    """
    dims = len(placement.shape)
    cells = placement.cells
    bounds = np.asarray(placement.shape, np.int64)
    hull_starts, hull_ends = placement.starts.copy(), placement.starts + placement.sizes
    hull_starts[:, -2:] = hull_starts[:, -2:] // BLOCK * BLOCK
    hull_ends[:, -2:] = np.minimum(-(-hull_ends[:, -2:] // BLOCK) * BLOCK, bounds[-2:])
    cut = np.flatnonzero(((hull_starts != placement.starts) | (hull_ends - hull_starts != placement.sizes)).any(axis=1))
    starts, ends = placement.starts[cut], (placement.starts + placement.sizes)[cut]
    found = intersect(hull_starts[cut], (hull_ends - hull_starts)[cut], cells.starts, cells.sizes)
    inside = ((found.starts >= starts[found.left]) & (found.starts + found.sizes <= ends[found.left])).all(axis=1)
    got = np.bincount(found.left, weights=np.prod(found.sizes, axis=1), minlength=len(cut))
    missing = got != np.prod(hull_ends[cut] - hull_starts[cut], axis=1)
    if missing.any():
        raise ValueError(
            f"rank {placement.ranks[cut[int(np.argmax(missing))]]} holds part of a block whose rest nobody has"
        )
    to = np.asarray(placement.ranks[cut[found.left]])
    turn = {int(rank): _turn(placement, int(index)) for rank, index in zip(placement.ranks[cut], cut, strict=True)}
    source = [
        cells.holders[cell][turn[int(rank)] % len(cells.holders[cell])]
        for rank, cell in zip(to[~inside], found.right[~inside], strict=True)
    ]
    keep = ~inside
    return Shares(
        to[keep],
        np.array(source, np.int64),
        found.starts[keep].reshape(-1, dims),
        found.sizes[keep].reshape(-1, dims),
    )


def teams(placements: Sequence[Placement], ranks: int) -> Ints:
    """Return for each of `ranks` ranks its team: the least rank among those that it must go through parameters with.

    Ranks that share blocks wait for each other's maxima, so they have to come to a parameter at about the same time.
    """
    team = np.arange(ranks)
    told = [shares(placement) for placement in placements]
    to, source = (np.concatenate([getattr(each, name) for each in told] or [team]) for name in ("to", "source"))
    while True:
        least = np.minimum(team[to], team[source])
        joined = team.copy()
        np.minimum.at(joined, to, least)
        np.minimum.at(joined, source, least)
        joined = joined[joined]
        if np.array_equal(joined, team):
            return team
        team = joined


def _turn(placement: Placement, index: int) -> int:
    """Return which of the copies of a box this one is, so that copies ask different neighbours."""
    alike = (placement.starts == placement.starts[index]).all(axis=1) & (placement.sizes == placement.sizes[index]).all(
        axis=1
    )
    return int((placement.ranks[alike] < placement.ranks[index]).sum())
