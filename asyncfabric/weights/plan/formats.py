"""Element types of weights: their sizes, their form in numpy, and casting and quantising them in numpy. Pure.

The reference for all that converts: a value is divided by its block's scale in float32 and rounded to nearest even.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

ITEM_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int32": 4,
    "uint8": 1,
}

STORED_AS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
    "float8_e4m3fn": np.dtype("u1"),
    "int32": np.dtype("<i4"),
    "uint8": np.dtype("u1"),
}

CASTS = {
    ("bfloat16", "float16"),
    ("bfloat16", "float32"),
    ("float16", "float32"),
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("float16", "bfloat16"),
}
"""Pairs of types that an element is converted between, by itself; to float8 it goes only in blocks."""

BLOCK = 128
"""Rows and columns of a quantisation block: one fp32 scale for each 128 x 128 elements, as DeepSeek-V3 publishes."""

SCALE_BYTES = 4


@lru_cache(maxsize=256)
def check_conversion(source: str, target: str, block: int) -> None:
    """Raise ValueError when the plan cannot turn elements of one type into the other."""
    for name in (source, target):
        if name not in ITEM_BYTES:
            raise ValueError(f"{name!r} is not an element type of weights, known are {sorted(ITEM_BYTES)}")
    if block not in (0, BLOCK):
        raise ValueError(f"block must be 0 (no quantisation) or {BLOCK}, got {block}")
    if block:
        if target != "float8_e4m3fn" or source not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"blocks quantise a floating type to float8_e4m3fn, got {source} to {target}")
    elif source != target and (source, target) not in CASTS:
        raise ValueError(f"{source} cannot be cast to {target} element by element; float8_e4m3fn needs block={BLOCK}")


Floats = NDArray[np.float32]

Elements = NDArray[Any]

E4M3_MAX = 448.0
"""Largest finite number of float8_e4m3fn, which has no infinities."""

SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
"""Scales are normal numbers: a block of zeros, or of numbers so small that their scale would vanish, gets this one."""


def to_float32(elements: Elements, dtype: str) -> Floats:
    """Return stored elements of a floating type as float32, exactly."""
    if dtype == "bfloat16":
        return (elements.astype(np.uint32) << 16).view(np.float32)
    if dtype in ("float16", "float32"):
        return elements.astype(np.float32)
    raise ValueError(f"{dtype} is no floating type that casts start from")


def from_float32(values: Floats, dtype: str) -> Elements:
    """Return float32 as stored elements of a wider-than-8-bit floating type, rounded to nearest even."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype("<u2")
    with np.errstate(over="ignore"):
        return np.asarray(values.astype(STORED_AS[dtype]))


def cast(elements: Elements, source: str, target: str) -> Elements:
    """Return elements converted one by one; equal types are copied bit by bit.

    Raises:
        ValueError: there is no such cast.
    """
    check_conversion(source, target, 0)
    if source == target:
        return elements.copy()
    return from_float32(to_float32(elements, source), target)


def to_e4m3(values: Floats) -> NDArray[np.uint8]:
    """Return float32 as float8_e4m3fn: rounded to nearest even, saturating at 448; NaN stays NaN."""
    size = np.minimum(np.abs(values), np.float32(E4M3_MAX)).astype(np.float32)
    bits = size.view(np.uint32)
    normal = ((bits + np.uint32(0x7FFFF) + ((bits >> 20) & 1)) >> 20) - np.uint32(120 << 3)
    with np.errstate(invalid="ignore"):
        tiny = np.rint(size * np.float32(512)).astype(np.uint32)  # below 2**-6 steps are 2**-9; 8 of them are normal
    code = np.where(size < np.float32(2.0**-6), tiny, normal)
    code = np.where(np.isnan(values), np.uint32(0x7F), code)
    return np.asarray((code | (np.signbit(values).astype(np.uint32) << 7)).astype(np.uint8))


def block_maxima(values: Floats, start: tuple[int, int]) -> Floats:
    """Return the largest absolute value of each block that the values touch, (..., block rows, block columns).

    Args:
        values: (..., rows, columns) of a tensor, float32; NaN makes the maximum NaN.
        start: row and column of the tensor at which the values begin; blocks count from the tensor's origin.
    """
    size = np.abs(values)
    for axis, begin in ((-2, start[0]), (-1, start[1])):
        first = begin // BLOCK
        count = -(-(begin + values.shape[axis]) // BLOCK) - first
        cuts = np.maximum((first + np.arange(count)) * BLOCK - begin, 0)
        size = np.maximum.reduceat(size, cuts, axis=axis)
    return np.asarray(size, np.float32)


def scales_of(maxima: Floats) -> Floats:
    """Return the scale of each block: what a stored element is multiplied with to get the weight back."""
    return np.asarray(np.maximum(maxima / np.float32(E4M3_MAX), np.float32(SMALLEST_SCALE)), np.float32)


def quantise(values: Floats, scales: Floats, start: tuple[int, int]) -> NDArray[np.uint8]:
    """Return the values divided by the scales of their blocks, as float8_e4m3fn.

    Args:
        values: (..., rows, columns), float32.
        scales: (..., block rows, block columns): of exactly the blocks that the values touch.
        start: as in `block_maxima`.
    """
    rows = (start[0] + np.arange(values.shape[-2])) // BLOCK - start[0] // BLOCK
    columns = (start[1] + np.arange(values.shape[-1])) // BLOCK - start[1] // BLOCK
    return to_e4m3(values / scales[..., rows, :][..., :, columns])
