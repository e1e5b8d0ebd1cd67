"""The memory behind torch tensors, as registrations need it: whole storages, and buffers to receive several tensors in.

Any thread. No fabric here.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from asyncfabric.integrations.registrations import Range

ALIGNMENT = 64
PACKED_BELOW = 1 << 20
"""Tensors of fewer bytes share a buffer, which lives as long as one of them; larger ones have a buffer each."""


class TensorPlace(NamedTuple):
    """Where a tensor is: `length` bytes from `offset` of buffer number `buffer`."""

    buffer: int
    offset: int
    length: int


def storage_range(tensor: torch.Tensor) -> Range:
    """Return the range of the whole storage of a tensor."""
    storage = tensor.untyped_storage()
    device = "cpu" if tensor.device.type == "cpu" else f"{tensor.device.type}:{tensor.device.index or 0}"
    return Range(device, storage.data_ptr(), storage.nbytes())


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes of the storage of a tensor as a tensor over the same memory."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


def offset_in_storage(tensor: torch.Tensor) -> int:
    """Return the first byte of a tensor within its storage."""
    return tensor.data_ptr() - tensor.untyped_storage().data_ptr()


def tensor_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of a contiguous tensor."""
    return prod(shape) * dtype.itemsize


def empty_tensors(
    layout: Sequence[tuple[Sequence[int], torch.dtype]], device: str | torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[TensorPlace]]:
    """Return uninitialised tensors, the byte buffers that they lie in, and where each of them lies.

    Small tensors share the first buffer, so that a thousand of them need one registration.
    """
    lengths = [tensor_bytes(shape, dtype) for shape, dtype in layout]
    places: list[TensorPlace] = []
    sizes: list[int] = []
    packed = sum(-(-length // ALIGNMENT) * ALIGNMENT for length in lengths if length < PACKED_BELOW)
    if packed:
        sizes.append(packed)
    filled = 0
    for length in lengths:
        if length >= PACKED_BELOW:
            places.append(TensorPlace(len(sizes), 0, length))
            sizes.append(length)
        else:
            places.append(TensorPlace(0, filled, length))
            filled += -(-length // ALIGNMENT) * ALIGNMENT
    buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    tensors = []
    for (shape, dtype), (number, offset, length) in zip(layout, places, strict=True):
        if length:
            tensors.append(buffers[number][offset : offset + length].view(dtype).reshape(tuple(shape)))
        else:
            tensors.append(torch.empty(tuple(shape), dtype=dtype, device=device))
    return tensors, buffers, places


def settle_streams(devices: set[torch.device]) -> None:
    """Block until what was queued on GPUs has run: nothing reads what a kernel has yet to write."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
