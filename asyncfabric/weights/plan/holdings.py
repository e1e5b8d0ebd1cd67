"""Holdings: the boxes that one trainer rank holds, as values that ranks exchange; tensors of one receiver. Pure.

A rank knows its own boxes for sure, and those of others only while every tensor lies on one mesh; so each rank sends
its own, whatever framework cut them, and all together are placements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from asyncfabric.weights.plan.formats import BLOCK, ITEM_BYTES
from asyncfabric.weights.plan.placement import Placement, boxes
from asyncfabric.weights.plan.target import SCALE_SUFFIX, Move


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """One rank's box of one parameter, in elements.

    Attributes:
        name: of the parameter.
        dtype: element type, a key of ITEM_BYTES.
        shape: of the whole parameter.
        start, size: of the box; a rank that holds nothing of a parameter reports nothing about it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]


class Held(NamedTuple):
    """A parameter at the trainers."""

    dtype: str
    placement: Placement


def held_by(reported: Sequence[Sequence[Holding]]) -> dict[str, Held]:
    """Return every parameter by name, from what each rank reported, in the order of ranks.

    Placements that are equal are the same object, which is what makes plans of many layers small.

    Raises:
        ValueError: ranks disagree about a shape or a type, a type is unknown, or a rank reports a parameter twice.
    """
    by_name: dict[str, dict[int, Holding]] = {}
    for rank, holdings in enumerate(reported):
        for one in holdings:
            ranks = by_name.setdefault(one.name, {})
            if rank in ranks:
                raise ValueError(f"{one.name}: rank {rank} reports it twice")
            ranks[rank] = one
    known: dict[bytes, Placement] = {}
    held = {}
    for name, ranks in by_name.items():
        first = next(iter(ranks.values()))
        for rank, one in ranks.items():
            if (one.dtype, one.shape) != (first.dtype, first.shape):
                raise ValueError(
                    f"{name}: rank {rank} has {one.shape} of {one.dtype}, another {first.shape} of {first.dtype}"
                )
        if first.dtype not in ITEM_BYTES:
            raise ValueError(f"{name}: {first.dtype!r} is not an element type of weights, known: {sorted(ITEM_BYTES)}")
        placement = boxes(first.shape, {rank: (one.start, one.size) for rank, one in ranks.items()})
        held[name] = Held(first.dtype, known.setdefault(placement.digest, placement))
    return held


class LocalTensor(NamedTuple):
    """One tensor: element type, a key of ITEM_BYTES, and shape."""

    dtype: str
    shape: tuple[int, ...]


def local_tensors(moves: Sequence[Move], receiver: int) -> dict[str, LocalTensor]:
    """Return the tensors of a receiver by name, scales (float32) beside what they scale."""
    found: dict[str, LocalTensor] = {}
    for move in moves:
        if move.region in found or receiver not in move.target.placement.ranks:
            continue
        row = move.target.placement.row_of(receiver)
        shape = tuple(move.target.local_shapes[row].tolist())
        found[move.region] = LocalTensor(move.to, shape)
        if move.block:
            cut = set(move.target.axes[-2:])
            blocks = tuple(-(-side // BLOCK) if axis in cut else side for axis, side in enumerate(shape))
            found[move.region + SCALE_SUFFIX] = LocalTensor("float32", blocks)
    return found
