"""What one trainer rank holds of each parameter, as words that ranks tell each other; all together are placements.

Pure values. A rank knows its own boxes for sure, and those of others only while every tensor lies on one mesh; so each
tells its own, whatever framework cut them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from asyncfabric.weights.formats import ITEM_BYTES
from asyncfabric.weights.placement import Placement, boxes


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """One rank's box of one parameter, in elements.

    Attributes:
        name: of the parameter.
        dtype: element type, a key of ITEM_BYTES.
        shape: of the whole parameter.
        start, size: of the box; a rank that holds nothing of a parameter tells nothing about it.
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


def held_by(told: Sequence[Sequence[Holding]]) -> dict[str, Held]:
    """Return every parameter by name, from what each rank told, in the order of ranks.

    Placements that are equal are the same object, which is what makes plans of many layers small.

    Raises:
        ValueError: ranks disagree about a shape or a type, a type is unknown, or a rank tells a parameter twice.
    """
    by_name: dict[str, dict[int, Holding]] = {}
    for rank, holdings in enumerate(told):
        for one in holdings:
            ranks = by_name.setdefault(one.name, {})
            if rank in ranks:
                raise ValueError(f"{one.name}: rank {rank} tells it twice")
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
