"""Page lists: whatever integers the user has, as C-contiguous int64 buffers that the engine copies.

Pure functions, vectorised: no Python object per page unless the user's own list is made of them.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from asyncfabric._api.tensor_view import Tensor

    PageList = Sequence[int] | np.ndarray[Any, Any] | Tensor | memoryview | array[int]


def page_array(name: str, pages: PageList) -> Any:
    """Return the pages as a C-contiguous buffer of int64 and without a copy where they are one already.

    Raises:
        TypeError: not a flat list of integers (bool and float are not integers).
        ValueError: more than one dimension, or a number beyond int64.
    """
    if type(pages) is list or type(pages) is tuple:
        return _from_sequence(name, pages)
    # numpy first: asking whether something is a tensor takes longer than all the rest.
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(pages, numpy.ndarray):
        return _from_ndarray(name, pages, numpy)
    if torch is not None and isinstance(pages, torch.Tensor):
        return _from_tensor(name, pages, torch)
    if isinstance(pages, array):
        if pages.typecode in "fdu":
            raise TypeError(f"{name} must hold integers, got an array of type {pages.typecode!r}")
        return pages if pages.typecode == "q" else _from_sequence(name, pages)
    if isinstance(pages, memoryview):
        return _from_view(name, pages)
    if isinstance(pages, (str, bytes, bytearray)) or not hasattr(pages, "__iter__"):
        raise TypeError(f"{name} must be a list or array of integers, got {type(pages).__name__}")
    return _from_sequence(name, list(pages))


def check_pages(name: str, pages: Any, page_bytes: int, stride: int, offset: int, length: int, what: str) -> None:
    """Raise ValueError naming the first page that leaves `length` bytes; for the reason why the engine refused it."""
    for position, page in enumerate(memoryview(pages).tolist()):
        end = offset + page * stride + page_bytes
        if page < 0 or end > length:
            raise ValueError(
                f"{name}[{position}] = {page} leaves {what}: bytes {offset + page * stride}..{end} of {length}"
                f" (offset {offset}, stride {stride}, page_bytes {page_bytes})"
            )


def _from_sequence(name: str, pages: Sequence[int]) -> Any:
    kinds = set(map(type, pages))
    if kinds <= {int}:
        numbers: Sequence[int] = pages
    else:
        numbers = [_number(name, position, page) for position, page in enumerate(pages)]
    try:
        return array("q", numbers)
    except OverflowError:
        raise ValueError(f"{name} holds a number beyond 64 bits: {min(numbers)}..{max(numbers)}") from None


def _number(name: str, position: int, page: Any) -> int:
    if isinstance(page, bool):
        raise TypeError(f"{name}[{position}] must be an integer, got the bool {page}")
    try:
        return index(page)
    except TypeError:
        raise TypeError(f"{name}[{position}] must be an integer, got {type(page).__name__} {page!r}") from None


def _from_ndarray(name: str, pages: Any, numpy: Any) -> Any:
    if pages.dtype == numpy.int64 and pages.ndim == 1 and pages.flags.c_contiguous:
        return pages
    if pages.dtype.kind not in "iu":
        if pages.size == 0 and pages.dtype.kind == "f":
            return array("q")  # np.array([]) is float64 and holds no float
        raise TypeError(f"{name} must hold integers, got an array of {pages.dtype}")
    if pages.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {pages.shape}")
    if pages.dtype == numpy.uint64 and pages.size and int(pages.max()) >= 1 << 63:
        raise ValueError(f"{name} holds a number beyond 63 bits: {int(pages.max())}")
    return numpy.ascontiguousarray(pages, dtype=numpy.int64)


def _from_tensor(name: str, pages: Any, torch: Any) -> Any:
    if pages.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        if pages.numel() == 0 and pages.dtype.is_floating_point:
            return array("q")  # torch.tensor([]) is float32 and holds no float
        raise TypeError(f"{name} must hold integers, got a tensor of {pages.dtype}")
    if pages.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(pages.shape)}")
    # A GPU tensor is copied to the host here: the engine reads page lists with the CPU.
    return pages.detach().to(device="cpu", dtype=torch.int64).contiguous().numpy()


def _from_view(name: str, pages: memoryview) -> Any:
    if pages.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got {pages.ndim}")
    if pages.format.lstrip("@=<") in ("q", "l") and pages.itemsize == 8 and pages.c_contiguous:
        return pages.cast("B").cast("q")
    return _from_sequence(name, pages.tolist())
