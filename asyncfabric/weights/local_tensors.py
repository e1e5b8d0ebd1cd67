"""The tensors of one rank of a replica: their names, types and shapes, out of the moves that fill them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asyncfabric.weights.formats import BLOCK
from asyncfabric.weights.target import SCALE_SUFFIX, Move


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
