"""Elements as torch works on them: integers of their width, which move any bits, and floats for arithmetic. Values."""

from __future__ import annotations

import torch

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
