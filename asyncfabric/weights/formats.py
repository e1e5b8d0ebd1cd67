"""Element types of weights: their sizes, and how numpy and the plan name them. Values only.

numpy has neither bfloat16 nor float8: both travel as unsigned integers of the same width, see `arithmetic`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

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

CASTS = {("bfloat16", "float16"), ("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16"),
         ("float32", "float16"), ("float16", "bfloat16")}  # fmt: skip
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
