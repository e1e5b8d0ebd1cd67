"""Converting and measuring boxes of weights tile by tile, so that temporaries stay small and in the cache. Pure.

Runs on worker threads; numpy lets go of the GIL. The bits are those of `arithmetic`, whose functions do the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncfabric.weights.arithmetic import block_maxima, cast, quantise, scales_of, to_float32
from asyncfabric.weights.boxes import Ints
from asyncfabric.weights.formats import BLOCK
from asyncfabric.weights.plan import Kind

TILE_ROWS = BLOCK
TILE_COLUMNS = 8 * BLOCK

TILE_BYTES = 64 * TILE_ROWS * TILE_COLUMNS
"""Bound on the temporaries of one tile, over all types: 8 MiB."""

Elements = NDArray[Any]
Floats = NDArray[np.float32]


def measure(shard: Elements, start: Ints, kind: Kind) -> Floats:
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
        for low, high in _steps(row, shard.shape[-2], TILE_ROWS):
            strip = shard[lead][low:high]
            if kind.dtype == "bfloat16":  # without its sign a number is the larger the larger its bits are
                most = to_float32(np.max(strip & np.uint16(0x7FFF), axis=0, keepdims=True), kind.dtype)
            else:
                most = np.max(np.abs(to_float32(strip, kind.dtype)), axis=0, keepdims=True)
            found[lead][(row + low) // BLOCK - row // BLOCK] = block_maxima(most, (0, column))[0]
    return found


def convert_into(out: Elements, box: Elements, kind: Kind, maxima: Floats | None, start: Ints, origin: Ints) -> None:
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
    base_row, base_column = int(origin[-2]) // BLOCK, int(origin[-1]) // BLOCK
    for lead in np.ndindex(*box.shape[:-2]):
        for low, high in _steps(row, box.shape[-2], TILE_ROWS):
            for left, right in _steps(column, box.shape[-1], TILE_COLUMNS):
                tile = box[lead][low:high, left:right]
                if maxima is None:
                    out[lead][low:high, left:right] = cast(tile, kind.dtype, kind.to)
                    continue
                first, second = (row + low) // BLOCK - base_row, (column + left) // BLOCK - base_column
                last = -(-(column + right) // BLOCK) - base_column
                place = tuple(int(a + b - c) for a, b, c in zip(lead, start[:-2], origin[:-2], strict=True))
                scales = scales_of(maxima[place][first : first + 1, second:last])
                values = quantise(to_float32(tile, kind.dtype), scales, (row + low, column + left))
                out[lead][low:high, left:right] = values


def _steps(begin: int, length: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield (low, high) of the parts that multiples of `step`, counted from the tensor's origin, cut a side in."""
    low = 0
    while low < length:
        high = min(length, (begin + low) // step * step + step - begin)
        yield low, high
        low = high
