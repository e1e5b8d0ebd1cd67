"""Placements: which rank holds which box of a tensor, and which ranks share quantisation blocks that shards cut. Pure.

Each rank sends the maxima of its parts of such blocks to the other holders, so that all divide by one scale (WT-2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from math import prod
from typing import NamedTuple

import numpy as np

from asyncfabric.weights.plan.boxes import Ints, contains, grid, intersect
from asyncfabric.weights.plan.formats import BLOCK

LONGEST = 1 << 62
"""Of a tensor's sides: sums of two fit into int64, also when bytes of a peer give them."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One mesh axis cuts dimension `dim` as torch.chunk does: equal chunks, the last ones shorter or empty."""

    dim: int


@dataclass(frozen=True, slots=True)
class Replicate:
    """Each rank along one mesh axis holds the same."""


@dataclass(frozen=True, eq=False)
class Mesh:
    """Ranks in an array with named axes; make one with `Mesh.of`.

    Attributes:
        axes: names in order, the last one runs fastest.
        ranks: int64, one dimension for each axis.
    """

    axes: tuple[str, ...]
    ranks: Ints

    @classmethod
    def of(cls, sizes: Mapping[str, int], first_rank: int = 0) -> Mesh:
        """Return the mesh of these axes, numbered row-major from `first_rank`; raises ValueError for sizes below 1."""
        if any(size < 1 for size in sizes.values()) or first_rank < 0:
            raise ValueError(f"sizes must be 1 or more and ranks 0 or more, got {dict(sizes)}, {first_rank}")
        shape = tuple(sizes.values())
        return cls(tuple(sizes), np.arange(first_rank, first_rank + prod(shape)).reshape(shape))

    def at(self, axis: str, coordinate: int) -> Mesh:
        """Return the part of the mesh at one coordinate of an axis; raises ValueError when there is none."""
        if axis not in self.axes or not 0 <= coordinate < self.ranks.shape[self.axes.index(axis)]:
            raise ValueError(
                f"a mesh of {dict(zip(self.axes, self.ranks.shape, strict=True))} has no {axis}={coordinate}"
            )
        where = self.axes.index(axis)
        return Mesh(self.axes[:where] + self.axes[where + 1 :], np.take(self.ranks, coordinate, axis=where))


@dataclass(frozen=True, eq=False)
class Placement:
    """Boxes of one tensor and who holds them; at most one box for a rank. Arrays must not be changed.

    Attributes:
        shape: the whole tensor.
        ranks: int64 (boxes,).
        starts, sizes: int64 (boxes, dimensions), in elements of the whole tensor.
    """

    shape: tuple[int, ...]
    ranks: Ints
    starts: Ints
    sizes: Ints

    def __post_init__(self) -> None:
        if any(not 0 <= side <= LONGEST for side in self.shape):
            raise ValueError(f"sides of a tensor are 0 to 2^62 elements, got {self.shape}")
        bounds = np.asarray(self.shape, np.int64)
        if self.starts.shape != (len(self.ranks), len(self.shape)) or self.sizes.shape != self.starts.shape:
            raise ValueError(f"boxes of a tensor of shape {self.shape} need one start and one size per dimension")
        if len(np.unique(self.ranks)) != len(self.ranks) or (self.ranks < 0).any():
            raise ValueError(f"a rank holds one box of a tensor and is 0 or more, got ranks {self.ranks.tolist()}")
        bad = ((self.starts < 0) | (self.sizes < 1) | (self.starts > bounds - self.sizes)).any(axis=1)
        if bad.any():
            at = int(np.argmax(bad))
            raise ValueError(
                f"rank {self.ranks[at]} holds {self.starts[at].tolist()}+{self.sizes[at].tolist()}, "
                f"which is not within the tensor's shape {self.shape}"
            )

    @cached_property
    def digest(self) -> bytes:
        """A stable hash of the content."""
        content = blake2b(repr(self.shape).encode(), digest_size=16)
        for column in (self.ranks, self.starts, self.sizes):
            content.update(np.ascontiguousarray(column, "<i8").tobytes())
        return content.digest()

    @cached_property
    def cells(self) -> Cells:
        """The tensor cut at every face of a box, with the ranks that hold each cell; cells of nobody are left out."""
        boxes = np.unique(np.concatenate([self.starts, self.sizes], axis=1), axis=0)
        dims = len(self.shape)
        if not len(boxes):
            empty = np.zeros((0, dims), np.int64)
            return Cells(empty, empty, [])
        starts, sizes = grid(boxes[:, :dims], boxes[:, dims:])
        holders = contains(self.starts, self.sizes, starts, sizes)
        held = holders.any(axis=1)
        order = np.argsort(self.ranks)
        ranks = self.ranks[order]
        groups = [tuple(ranks[row].tolist()) for row in holders[held][:, order]]
        return Cells(starts[held], sizes[held], groups)

    def row_of(self, rank: int) -> int:
        """Return the index of a rank's box; raises ValueError when it holds none."""
        found = np.flatnonzero(self.ranks == rank)
        if not len(found):
            raise ValueError(f"rank {rank} holds nothing of this tensor, its holders are {self.ranks.tolist()}")
        return int(found[0])

    def box_of(self, rank: int) -> tuple[slice, ...]:
        """Return a rank's box as slices of the whole tensor; raises ValueError when it holds none."""
        row = self.row_of(rank)
        box = zip(self.starts[row].tolist(), self.sizes[row].tolist(), strict=True)
        return tuple(slice(begin, begin + size) for begin, size in box)


@dataclass(frozen=True, eq=False)
class Cells:
    """Disjoint boxes and the ranks, ascending, that hold each of them."""

    starts: Ints
    sizes: Ints
    holders: list[tuple[int, ...]]


def place(shape: Sequence[int], mesh: Mesh, how: Mapping[str, Shard | Replicate] | None = None) -> Placement:
    """Return the placement of a tensor on a mesh; axes that are not named replicate.

    Several axes that shard one dimension cut it in the order of the mesh, as DTensor does; FSDP2 over tensor
    parallelism cuts the other way round, so give the mesh its axes in that order. Ranks whose shard is empty
    hold nothing and are left out.

    Raises:
        ValueError: an axis or a dimension that does not exist.
    """
    how = how or {}
    if unknown := set(how) - set(mesh.axes):
        raise ValueError(f"the mesh has axes {mesh.axes}, not {sorted(unknown)}")
    ranks = mesh.ranks.reshape(-1)
    coordinates = np.stack(np.unravel_index(np.arange(len(ranks)), mesh.ranks.shape), axis=1)
    starts = np.zeros((len(ranks), len(shape)), np.int64)
    sizes = np.tile(np.asarray(shape, np.int64), (len(ranks), 1))
    for axis, count in enumerate(mesh.ranks.shape):
        rule = how.get(mesh.axes[axis], Replicate())
        if isinstance(rule, Replicate):
            continue
        if not 0 <= rule.dim < len(shape):
            raise ValueError(f"Shard({rule.dim}): a tensor of shape {tuple(shape)} has no such dimension")
        length = sizes[:, rule.dim]
        chunk = -(-length // count)
        low = np.minimum(coordinates[:, axis] * chunk, length)
        sizes[:, rule.dim] = np.minimum(low + chunk, length) - low
        starts[:, rule.dim] += low
    held = (sizes > 0).all(axis=1)
    return Placement(tuple(shape), ranks[held], starts[held], sizes[held])


def boxes(shape: Sequence[int], held: Mapping[int, tuple[Sequence[int], Sequence[int]]]) -> Placement:
    """Return the placement of a plain tensor: for each rank (start, size) of its box.

    Raises:
        ValueError: a box is empty, or leaves the tensor.
    """
    dims = len(shape)
    starts = np.array([list(start) for start, _ in held.values()], np.int64).reshape(len(held), dims)
    sizes = np.array([list(size) for _, size in held.values()], np.int64).reshape(len(held), dims)
    return Placement(tuple(shape), np.array(list(held), np.int64), starts, sizes)


class Shares(NamedTuple):
    """Columns: rank `to` needs, from rank `source`, the maxima of the parts of blocks in this box of the parameter."""

    to: Ints
    source: Ints
    starts: Ints
    sizes: Ints


def shares(placement: Placement) -> Shares:
    """Return who sends whom maxima of a parameter that is quantised, ordered by `to`.

    Every holder of a cut block is named, also one that sends nothing: copies of a shard ask each their own neighbours.

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
    reported = [shares(placement) for placement in placements]
    to, source = (np.concatenate([getattr(each, name) for each in reported] or [team]) for name in ("to", "source"))
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
