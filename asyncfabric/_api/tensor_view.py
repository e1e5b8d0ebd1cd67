"""Tensors over region memory, without a copy. torch is imported here only, when somebody asks for a tensor.

Runs on any thread.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from asyncfabric._api.checks import checked_index

if TYPE_CHECKING:
    from torch import Tensor as Tensor  # the one place of this layer that names torch's types
    from torch import dtype

    DType = dtype

    from asyncfabric._api.region import AnyRegion


class _GpuBytes:
    """Bytes of a GPU region as other frameworks take them; a tensor over them keeps the Region object alive."""

    def __init__(self, region: AnyRegion, offset: int, length: int) -> None:
        self.region = region
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (region._base + offset, False),
            "version": 3,
        }


def tensor_over(
    region: AnyRegion, offset: int, length: int, dtype: DType, shape: tuple[int, ...] | list[int] | int | None
) -> Tensor:
    """Return a tensor over bytes [offset, offset + length) of a region.

    Raises:
        TypeError: dtype is not a torch dtype.
        ValueError: the shape needs more bytes than there are, the bytes are no whole number of elements or not aligned
            to them, or the buffer is read-only (torch knows no read-only tensors).
    """
    import torch

    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
    size = dtype.itemsize
    if shape is None:
        if length % size:
            raise ValueError(f"{length} bytes are no whole number of {dtype} elements of {size} bytes")
        sides: tuple[int, ...] = (length // size,)
    else:
        given = shape if isinstance(shape, (tuple, list)) else (shape,)
        sides = tuple(checked_index("shape", side) for side in given)
    if prod(sides) * size > length:
        raise ValueError(f"shape {sides} of {dtype} needs {prod(sides) * size} bytes, there are {length}")
    if region._readonly:
        raise ValueError("the registered buffer is read-only, and a tensor could be written to; use .memory")
    if (region._base + offset) % size:
        raise ValueError(f"byte {offset} of the region is not aligned to {dtype} elements of {size} bytes")
    count = prod(sides)
    if count == 0:
        return torch.empty(sides, dtype=dtype)
    if region.device != "cpu":
        view = torch.as_tensor(_GpuBytes(region, offset, count * size), device=region.device)
        return view.view(dtype).view(sides)
    return torch.frombuffer(region.memory, dtype=dtype, count=count, offset=offset).view(sides)
