"""The compiled row loops as the exchange uses them, and tensors as the bytes that they take.

Any thread. Loaded at first use, so that layouts can be planned where nothing was compiled.
"""

from __future__ import annotations

from functools import cache

import torch

from asyncfabric._kernels.native import native_record_loops, native_row_loops
from asyncfabric._kernels.records import RecordLoops
from asyncfabric._kernels.rows import Bytes, RowLoops, RowMemory

KINDS: dict[torch.dtype, int] = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""Numbers of the dtypes that sums are made of."""


@cache
def row_loops() -> RowLoops:
    """Return the compiled loops; raises DeviceError when nothing was compiled."""
    return native_row_loops()


@cache
def record_loops() -> RecordLoops:
    """Return compiled routes and records; raises DeviceError when nothing was compiled."""
    return native_record_loops()


def rows_of(tensor: torch.Tensor) -> RowMemory:
    """Return contiguous rows of a tensor on the CPU as the loops take them."""
    count, width = tensor.shape
    return row_loops().rows_at(tensor.data_ptr(), count, width * tensor.itemsize, tensor)


def as_bytes(rows: torch.Tensor) -> Bytes:
    """Return contiguous rows of a tensor as bytes, without a copy."""
    return rows.view(torch.uint8).numpy()
