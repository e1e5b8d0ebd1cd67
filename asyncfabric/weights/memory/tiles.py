"""Tiles: boxes in host memory measured and converted, plane by plane, compiled where possible, else tile by tile.

Runs on worker threads. Memory beyond the box is bounded by one tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncfabric._kernels.converting import CASTS, KINDS, Converting
from asyncfabric._kernels.native import native_converting
from asyncfabric.weights.plan.boxes import Ints
from asyncfabric.weights.plan.formats import BLOCK, block_maxima, cast, quantise, scales_of, to_float32
from asyncfabric.weights.plan.parts import MoveKind

Elements = NDArray[Any]

Floats = NDArray[np.float32]

_converting = cache(native_converting)


def convert_plane(out: Elements, plane: Elements, kind: MoveKind, scales: Floats | None, row: int, column: int) -> bool:
    """Cast or quantise a matrix into memory, if that is compiled; return whether it was done.

    Args:
        out: where to, in its shape.
        plane: elements as stored, (rows, columns).
        kind: its types.
        scales: of exactly the blocks that it touches; None when nothing is quantised.
        row: where it begins in the parameter.
        column: the same.
    """
    loops: Converting | None = _converting()
    if loops is None or kind.dtype not in KINDS or (scales is None and (kind.dtype, kind.to) not in CASTS):
        return False
    source, turned = _bytes(plane), out.strides[1] != out.itemsize
    into = _bytes(out.T if turned else out)
    if source is None or into is None:
        return False
    if scales is None:
        loops.cast(source, KINDS[kind.dtype], KINDS[kind.to], into, turned)
    else:
        at = row % BLOCK, column % BLOCK
        loops.quantise(source, KINDS[kind.dtype], *at, np.ascontiguousarray(scales), into, turned)
    return True


def measure_plane(found: Floats, plane: Elements, dtype: str, row: int, column: int) -> bool:
    """Write the maxima of the blocks that a matrix touches, if that is compiled; return whether it was done."""
    loops: Converting | None = _converting()
    source = _bytes(plane)
    if loops is None or source is None or dtype not in KINDS:
        return False
    loops.measure(source, KINDS[dtype], row % BLOCK, column % BLOCK, found)
    return True


def _bytes(plane: Elements) -> NDArray[np.uint8] | None:
    """Return rows of bytes, where the elements of a row are next to each other."""
    return plane.view(np.uint8) if plane.size and plane.strides[1] == plane.itemsize else None


TILE_ROWS = BLOCK

TILE_COLUMNS = 8 * BLOCK

TILE_BYTES = 64 * TILE_ROWS * TILE_COLUMNS
"""Bound on the temporaries of one tile, over all types: 8 MiB."""


def measure(shard: Elements, start: Ints, kind: MoveKind) -> Floats:
    """Return the maxima of the blocks that a shard (or a box of one) touches, (..., block rows, block columns).

    Args:
        shard: elements as stored.
        start: where it begins in the parameter.
        kind: its types.
    """
    row, column = int(start[-2]), int(start[-1])
    rows, columns = (
        -(-(at + size) // BLOCK) - at // BLOCK for at, size in ((row, shard.shape[-2]), (column, shard.shape[-1]))
    )
    found = np.zeros((*shard.shape[:-2], rows, columns), np.float32)
    for lead in np.ndindex(*shard.shape[:-2]):
        if measure_plane(found[lead], shard[lead], kind.dtype, row, column):
            continue
        for low, high in _steps(row, shard.shape[-2], TILE_ROWS):
            strip = shard[lead][low:high]
            if kind.dtype == "bfloat16":  # without its sign a number is the larger the larger its bits are
                most = to_float32(np.max(strip & np.uint16(0x7FFF), axis=0, keepdims=True), kind.dtype)
            else:
                most = np.max(np.abs(to_float32(strip, kind.dtype)), axis=0, keepdims=True)
            found[lead][(row + low) // BLOCK - row // BLOCK] = block_maxima(most, (0, column))[0]
    return found


def convert_into(
    out: Elements, box: Elements, kind: MoveKind, maxima: Floats | None, start: Ints, origin: Ints
) -> None:
    """Cast or quantise a box into memory.

    Args:
        out: where to, in the shape of the box; any strides.
        box: elements as stored, as many dimensions.
        kind: its types.
        maxima: of the shard's blocks, all holders' parts in it; None when nothing is quantised.
        start: where the box begins in the parameter.
        origin: where the shard begins in the parameter.
    """
    if kind.dtype == kind.to:
        out[...] = box
        return
    row, column = int(start[-2]), int(start[-1])
    # In blocks of the shard, whose origin may lie within one: those that the box touches.
    rows, columns = (
        slice(at // BLOCK - base // BLOCK, -(-(at + length) // BLOCK) - base // BLOCK)
        for at, length, base in ((row, box.shape[-2], int(origin[-2])), (column, box.shape[-1], int(origin[-1])))
    )
    for lead in np.ndindex(*box.shape[:-2]):
        scales = None
        if maxima is not None:
            place = tuple(int(a + b - c) for a, b, c in zip(lead, start[:-2], origin[:-2], strict=True))
            scales = scales_of(maxima[place][rows, columns])
        if not convert_plane(out[lead], box[lead], kind, scales, row, column):
            _convert_tiles(out[lead], box[lead], kind, scales, row, column)


def _convert_tiles(
    out: Elements, plane: Elements, kind: MoveKind, scales: Floats | None, row: int, column: int
) -> None:
    """Do with numpy what `convert_plane` does."""
    for low, high in _steps(row, plane.shape[0], TILE_ROWS):
        for left, right in _steps(column, plane.shape[1], TILE_COLUMNS):
            tile = plane[low:high, left:right]
            if scales is None:
                out[low:high, left:right] = cast(tile, kind.dtype, kind.to)
                continue
            first, second = (row + low) // BLOCK - row // BLOCK, (column + left) // BLOCK - column // BLOCK
            last = -(-(column + right) // BLOCK) - column // BLOCK
            values = to_float32(tile, kind.dtype)
            out[low:high, left:right] = quantise(
                values, scales[first : first + 1, second:last], (row + low, column + left)
            )


def _steps(begin: int, length: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield (low, high) of the parts that multiples of `step`, counted from the tensor's origin, cut a side in."""
    low = 0
    while low < length:
        high = min(length, (begin + low) // step * step + step - begin)
        yield low, high
        low = high
