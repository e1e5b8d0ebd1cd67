"""Arithmetic on a GPU with torch: casting, quantising and maxima, equal bit for bit to `formats`; views of stored bits.

Runs on the thread that launches. Integers of an element's width move any bits; floats are for arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from asyncfabric.weights.memory.tiles import Floats
from asyncfabric.weights.plan.boxes import Ints
from asyncfabric.weights.plan.formats import BLOCK, E4M3_MAX, STORED_AS, scales_of
from asyncfabric.weights.plan.parts import MoveKind

BITS: dict[str, torch.dtype] = {
    "float32": torch.int32,
    "bfloat16": torch.int16,
    "float16": torch.int16,
    "float8_e4m3fn": torch.uint8,
    "int32": torch.int32,
    "uint8": torch.uint8,
}
"""By the names of `formats`: what stored elements are viewed as."""

FLOATS: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

BY_BYTES: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

STRIP_ELEMENTS = 1 << 21


def to_float32(bits: Tensor, dtype: str) -> Tensor:
    """Return stored elements of a floating type as float32, exactly."""
    if dtype == "float32":
        return bits.view(torch.float32)
    if dtype == "bfloat16":
        return (bits.to(torch.int32) << 16).view(torch.float32)
    wide = bits.to(torch.int32)
    nan = (wide & 0x8000) << 16 | 0x7FC00000 | (wide & 0x3FF) << 13
    values = bits.view(torch.float16).to(torch.float32)
    return torch.where((wide & 0x7FFF) > 0x7C00, nan.view(torch.float32), values)


def from_float32(values: Tensor, dtype: str) -> Tensor:
    """Return float32 as stored elements of a wider-than-8-bit floating type, rounded to nearest even."""
    if dtype == "float32":
        return values.view(torch.int32)
    found = values.to(FLOATS[dtype]).view(torch.int16)
    if dtype == "bfloat16":
        return torch.where(values.isnan(), torch.full_like(found, 0x7FC0), found)
    bits = values.view(torch.int32)
    nan = ((bits >> 16) & 0x8000) | 0x7E00 | ((bits >> 13) & 0x3FF)
    return torch.where(values.isnan(), nan.to(torch.int16), found)


def quantised(values: Tensor, scales: Tensor) -> Tensor:
    """Return values divided by scales, as float8_e4m3fn: rounded to nearest even, saturating; NaN stays NaN."""
    quotient = values / scales
    code = quotient.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    negative = torch.where(values.isnan(), values.signbit(), values.isinf() & scales.isinf())  # as processors have it
    nan = torch.where(negative, 0xFF, 0x7F).to(torch.uint8)
    return torch.where(quotient.isnan(), nan, code)


def block_maxima(shard: Tensor, start: Ints, kind: MoveKind) -> Floats:
    """Return, in host memory, the maxima of the blocks that a shard touches; as `tiles.measure`.

    Args:
        shard: bits of a floating type, (..., rows, columns).
        start: where it begins in the parameter.
        kind: its types.
    """
    row, column = int(start[-2]) % BLOCK, int(start[-1]) % BLOCK
    rows, columns = (-(-(at + side) // BLOCK) for at, side in ((row, shard.shape[-2]), (column, shard.shape[-1])))
    sign = 0x7FFFFFFF if shard.dtype == torch.int32 else 0x7FFF  # without its sign a number is the larger the more bits
    found = torch.zeros((*shard.shape[:-2], rows, columns), dtype=shard.dtype, device=shard.device)
    step = max(1, STRIP_ELEMENTS // (columns * BLOCK * BLOCK))
    for lead in np.ndindex(*shard.shape[:-2]):
        for first in range(0, rows, step):
            last = min(rows, first + step)
            low, high = max(0, first * BLOCK - row), min(shard.shape[-2], last * BLOCK - row)
            part = shard[lead][low:high]
            size = part & sign
            if size.shape != ((last - first) * BLOCK, columns * BLOCK):
                whole = size.new_zeros(((last - first) * BLOCK, columns * BLOCK))
                at = low + row - first * BLOCK
                whole[at : at + size.shape[0], column : column + size.shape[1]] = size
                size = whole
            found[lead][first:last] = size.view(last - first, BLOCK, columns, BLOCK).amax((1, 3))
    return sizes_of(found.cpu().numpy(), kind.dtype)


def sizes_of(bits: np.ndarray, dtype: str) -> Floats:
    """Return bits without a sign, in integers of any width, as numbers."""
    if dtype == "bfloat16":
        return np.asarray((bits.astype(np.uint32) << 16).view(np.float32))
    width = STORED_AS[dtype].itemsize
    return np.asarray(bits.astype(f"<u{width}").view(STORED_AS[dtype]).astype(np.float32))


def convert(out: Tensor, box: Tensor, kind: MoveKind, scales: Tensor | None, start: Ints) -> None:
    """Cast or quantise a box, or put it in order.

    Args:
        out: where to, in the shape of the box; any strides.
        box: bits, as many dimensions.
        kind: its types.
        scales: of exactly the blocks that the box touches; None when nothing is quantised.
        start: where the box begins in the parameter.
    """
    if kind.dtype == kind.to:
        out.copy_(box)
        return
    row, column = int(start[-2]) % BLOCK, int(start[-1]) % BLOCK
    rows = (row + torch.arange(box.shape[-2], dtype=torch.int64, device=box.device)) // BLOCK
    columns = (column + torch.arange(box.shape[-1], dtype=torch.int64, device=box.device)) // BLOCK
    for lead in np.ndindex(*box.shape[:-2]):
        for strip in _strips(box.shape[-2], box.shape[-1]):
            values = to_float32(box[lead][strip], kind.dtype)
            if scales is None:
                out[lead][strip] = from_float32(values, kind.to)
            else:
                out[lead][strip] = quantised(values, scales[lead][rows[strip]][:, columns])


def box_scales(maxima: Floats, start: Ints, size: tuple[int, ...], origin: Ints) -> Floats:
    """Return the scales of the blocks that a box touches.

    Args:
        maxima: of the shard's blocks.
        start: where the box begins in the parameter.
        size: of the box.
        origin: where the shard begins in the parameter.
    """
    cut = [
        slice(int(at - low), int(at - low) + side)
        for at, low, side in zip(start[:-2], origin[:-2], size[:-2], strict=True)
    ]
    for at, low, side in zip(start[-2:].tolist(), origin[-2:].tolist(), size[-2:], strict=True):
        cut.append(slice(at // BLOCK - low // BLOCK, -(-(at + side) // BLOCK) - low // BLOCK))
    return scales_of(maxima[tuple(cut)])


def _strips(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, STRIP_ELEMENTS // max(1, columns))
    for low in range(0, rows, step):
        yield slice(low, min(rows, low + step))
