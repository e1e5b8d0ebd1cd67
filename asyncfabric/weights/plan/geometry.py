"""The pieces of one kind of move: cells of the trainers' shards cut by the boxes that a replica wants. Pure.

Moves that differ only in names (the same expert in each layer) share their pieces, which is why a plan of a trillion
parameters is small. A piece is a box of the source parameter that one rank holds whole and one receiver wants.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from asyncfabric.weights.plan.boxes import Ints, intersect, row_major_strides, split, volumes
from asyncfabric.weights.plan.formats import ITEM_BYTES, SCALE_BYTES

if TYPE_CHECKING:
    from asyncfabric.weights.plan.target import Move


@dataclass(frozen=True, eq=False)
class Pieces:
    """Columns of pieces, one row for each; boxes are in elements of the source parameter, all else in bytes.

    Attributes:
        cell: which cell of the source placement, that is which ranks could send it.
        receiver: rank within the replica.
        twin: pieces of one kind with equal boxes have equal numbers: their bytes are the same at several receivers.
        start, size: (pieces, dimensions).
        offset: where it begins in the receiver's tensor.
        stride: (pieces, dimensions): distance there of neighbours along each dimension of the source.
        run_bytes: length of one contiguous run at the receiver.
        runs: how many of those the piece is.
        scale_start, scale_size: (pieces, 2): the quantisation blocks whose scale this piece writes; the size is 0 if
            none.
        scale_offset, scale_stride: where those go in the tensor of scales; strides as above.
        scale_runs: contiguous runs of scales.
    """

    cell: Ints
    receiver: Ints
    twin: Ints
    start: Ints
    size: Ints
    offset: Ints
    stride: Ints
    run_bytes: Ints
    runs: Ints
    scale_start: Ints
    scale_size: Ints
    scale_offset: Ints
    scale_stride: Ints
    scale_runs: Ints

    def __len__(self) -> int:
        return len(self.cell)

    @property
    def write_bytes(self) -> Ints:
        """Bytes that each piece writes, scales included."""
        scales = volumes(self.scale_size) * np.prod(self.size[:, :-2], axis=1, dtype=np.int64)
        return np.asarray(self.run_bytes * self.runs + scales * SCALE_BYTES)


def cut_pieces(move: Move, chunk_bytes: int) -> Pieces:
    """Return the pieces of a move, by cell, then by receiver; none writes more than about `chunk_bytes`.

    Raises:
        ValueError: something that a replica wants is held by no trainer; a quantised box cuts a block at the receiver.
    """
    target, cells = move.target, move.source.cells
    wanted = target.placement
    if move.block:
        _check_blocks(move)
    found = intersect(cells.starts, cells.sizes, wanted.starts, wanted.sizes)
    _check_covered(move, found.right, found.sizes)
    grain = move.block or 1
    index, start, size = split(found.starts, found.sizes, max(1, chunk_bytes // ITEM_BYTES[move.to]), grain)
    row = found.right[index]

    axes = list(target.axes)
    item = ITEM_BYTES[move.to]
    stride = row_major_strides(target.local_shapes)[:, axes] * item
    base = (row_major_strides(target.local_shapes) * target.origins).sum(axis=1) * item
    offset = base[row] + ((start - wanted.starts[row]) * stride[row]).sum(axis=1)
    run_bytes, runs = _runs(size, stride[row], item)
    twin = _twins(start, size)
    scales = _scales(move, row, start, size)
    return Pieces(
        found.left[index], wanted.ranks[row], twin, start, size, offset, stride[row], run_bytes, runs, *scales
    )


def join_pieces(parts: list[Pieces], dims: int) -> Pieces:
    """Return several lists of pieces as one; boxes get leading dimensions of length 1 up to `dims`."""

    def column(name: str) -> Ints:
        pads = {"start": 0, "size": 1, "stride": 0, "scale_stride": 0}
        arrays = [getattr(part, name) for part in parts]
        if name in pads:
            arrays = [
                np.pad(array, ((0, 0), (dims - array.shape[1], 0)), constant_values=pads[name]) for array in arrays
            ]
        return np.concatenate(arrays)

    return Pieces(**{field.name: column(field.name) for field in fields(Pieces)})


def _check_blocks(move: Move) -> None:
    wanted, block = move.target.placement, move.block
    bounds = np.asarray(wanted.shape, np.int64)[-2:]
    starts = wanted.starts[:, -2:]
    ends = starts + wanted.sizes[:, -2:]
    origins = move.target.origins[:, list(move.target.axes)[-2:]]
    bad = ((starts % block != 0) | ((ends % block != 0) & (ends != bounds)) | (origins % block != 0)).any(axis=1)
    if bad.any():
        at = int(np.argmax(bad))
        raise ValueError(
            f"{move.parameter}: rank {wanted.ranks[at]} of the replica wants {starts[at].tolist()}..{ends[at].tolist()}"
            f" at {origins[at].tolist()}, which cuts blocks of {block}; shard {move.region} at multiples of {block}"
        )


def _check_covered(move: Move, rows: Ints, sizes: Ints) -> None:
    wanted = move.target.placement
    got = np.bincount(rows, weights=volumes(sizes), minlength=len(wanted.ranks))
    missing = got != volumes(wanted.sizes)
    if missing.any():
        at = int(np.argmax(missing))
        raise ValueError(
            f"{move.parameter}: rank {wanted.ranks[at]} of the replica wants {wanted.starts[at].tolist()}"
            f"+{wanted.sizes[at].tolist()}, of which trainers hold {int(got[at])} of "
            f"{int(volumes(wanted.sizes)[at])} elements"
        )


def _runs(size: Ints, stride: Ints, item: int) -> tuple[Ints, Ints]:
    """Return (bytes of a contiguous run, number of runs) at the receiver."""
    run = np.full(len(size), item, np.int64)
    total = volumes(size) * item
    order = np.argsort(stride, axis=1, kind="stable")
    going = np.ones(len(size), bool)
    for nth in range(size.shape[1]):
        each = order[:, nth : nth + 1]
        length = np.take_along_axis(size, each, axis=1)[:, 0]
        step = np.take_along_axis(stride, each, axis=1)[:, 0]
        going &= (step == run) | (length == 1)
        run = np.where(going, run * length, run)
    return run, total // run


def _twins(start: Ints, size: Ints) -> Ints:
    if not len(start) or not start.shape[1]:
        return np.zeros(len(start), np.int64)
    _, twin = np.unique(np.concatenate([start, size], axis=1), axis=0, return_inverse=True)
    return twin.reshape(-1).astype(np.int64)


def _scales(move: Move, row: Ints, start: Ints, size: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Return the columns of the scales: a block's scale is written by the piece that has the block's first element."""
    count, block = len(row), move.block
    if not block:
        none = np.zeros((count, 2), np.int64)
        return none, none, np.zeros(count, np.int64), np.zeros((count, start.shape[1]), np.int64), none[:, 0]
    target = move.target
    axes = list(target.axes)
    first = -(-start[:, -2:] // block)
    scale_size = -(-(start + size)[:, -2:] // block) - first
    scale_size[(scale_size <= 0).any(axis=1)] = 0
    shapes, origins = target.local_shapes.copy(), target.origins.copy()
    shapes[:, axes[-2:]] = -(-shapes[:, axes[-2:]] // block)
    origins[:, axes[-2:]] //= block
    strides = row_major_strides(shapes)
    base = (strides * origins).sum(axis=1) * SCALE_BYTES
    step = strides[:, axes] * SCALE_BYTES
    local = start - target.placement.starts[row]
    local[:, -2:] = first - target.placement.starts[row][:, -2:] // block
    offset = base[row] + (local * step[row]).sum(axis=1)
    extent = np.concatenate([size[:, :-2], np.maximum(scale_size, 1)], axis=1)
    runs = _runs(extent, step[row], SCALE_BYTES)[1] * (scale_size > 0).all(axis=1)
    return first, scale_size, offset, step[row], runs
