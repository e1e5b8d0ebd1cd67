"""Blocks: descriptors as columns of numbers, and what callers give as descriptors read into them.

Pure functions, any thread; no Python object per block once they are columns.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncfabric.integrations.nixl.errors import nixlInvalidParamError, nixlNotFoundError
from asyncfabric.integrations.nixl.kinds import DRAM, VRAM, nixl_mem_t

Column = NDArray[np.int64]


class Blocks(NamedTuple):
    """Contiguous pieces of memory of one type; three columns of one length."""

    memory: nixl_mem_t
    addresses: Column
    lengths: Column
    devices: Column

    def __len__(self) -> int:
        return len(self.addresses)

    @property
    def rows(self) -> Column:
        """The blocks as one array of (address, length, device)."""
        return np.column_stack((self.addresses, self.lengths, self.devices))


def from_rows(memory: nixl_mem_t, rows: Any) -> Blocks:
    """Read an Nx3 array, or tuples, of (address, length, device).

    Raises:
        TypeError: another shape.
        ValueError: something else than integers, a negative one, or one beyond 63 bits.
    """
    table = _integers(rows)
    if table.ndim != 2 or table.shape[1] != 3:
        raise TypeError(f"descriptors are rows of (address, length, device), got shape {table.shape}")
    return Blocks(memory, *(np.ascontiguousarray(column) for column in table.T))


def from_strided(memory: nixl_mem_t, rows: Any) -> Blocks:
    """Read an Nx5 array of (address, length, device, stride, count): `count` blocks, `stride` bytes apart.

    Raises:
        TypeError, ValueError: as from `from_rows`.
        nixlNotFoundError: a row of no blocks, or of blocks that overlap, as NIXL takes none of these for memory.
    """
    table = _integers(rows)
    if table.ndim != 2 or table.shape[1] != 5:
        raise TypeError(f"strided descriptors are rows of (address, length, device, stride, count), got {table.shape}")
    addresses, lengths, devices, strides, counts = table.T
    bad = np.flatnonzero((counts == 0) | ((counts > 1) & (strides < lengths)))
    if len(bad) or not len(table):
        row = table[int(bad[0])].tolist() if len(bad) else []
        raise nixlNotFoundError(f"strided row {row}: it needs a block, and a stride that is no less than the length")
    total = int(counts.sum())
    first = np.repeat(np.cumsum(counts) - counts, counts)
    steps = np.arange(total, dtype=np.int64) - first
    return Blocks(
        memory,
        np.repeat(addresses, counts) + steps * np.repeat(strides, counts),
        np.repeat(lengths, counts),
        np.repeat(devices, counts),
    )


def positions_of(side: str, indices: Any, count: int) -> Column:
    """Return positions in the list of one side, "local" or "remote", of so many descriptors.

    Raises:
        nixlInvalidParamError: no flat list of integers, or one that is out of range.
    """
    found = np.asarray(indices)
    if found.size == 0:
        return np.zeros(0, dtype=np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise nixlInvalidParamError(f"{side} positions are a flat list of integers, got {found.dtype} {found.shape}")
    column = found.astype(np.int64, copy=False)
    low, high = int(column.min()), int(column.max())
    if low < 0 or high >= count:
        wrong = low if low < 0 else high
        raise nixlInvalidParamError(f"{side} position {wrong} is out of range: the list has {count} descriptors")
    return column


def is_tensor(thing: object) -> bool:
    """Return whether it is a torch tensor; torch is not imported for the answer."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(thing, torch.Tensor)


def from_tensors(tensors: Sequence[Any]) -> Blocks:
    """Read contiguous torch tensors of one device.

    Raises:
        TypeError: something else among them, one that is not contiguous, or on another device than the first.
    """
    rows = np.zeros((len(tensors), 3), dtype=np.int64)
    for position, tensor in enumerate(tensors):
        if not is_tensor(tensor):
            raise TypeError(f"descriptor {position} is a {type(tensor).__name__}, the first is a tensor")
        if not tensor.is_contiguous():
            raise TypeError(f"tensor {position} of shape {tuple(tensor.shape)} is not contiguous")
        if tensor.device != tensors[0].device:
            raise TypeError(f"tensor {position} is on {tensor.device}, the first on {tensors[0].device}")
        rows[position] = tensor.data_ptr(), tensor.numel() * tensor.element_size(), max(tensor.get_device(), 0)
    return from_rows(DRAM if tensors[0].get_device() < 0 else VRAM, rows)


def _integers(rows: Any) -> Column:
    table = np.asarray(rows)
    if table.size == 0:
        return np.zeros((0, table.shape[1] if table.ndim == 2 else 3), dtype=np.int64)
    if table.dtype.kind not in "iu":
        raise ValueError(f"descriptors are integers, got {table.dtype}")
    if table.dtype.kind == "u" and int(table.max()) >= 1 << 63:
        raise ValueError(f"a descriptor holds the number {int(table.max())}, beyond 63 bits")
    if table.dtype.kind == "i" and int(table.min()) < 0:
        raise ValueError(f"a descriptor holds the negative number {int(table.min())}")
    return table.astype(np.int64, copy=False)
