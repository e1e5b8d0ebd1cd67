"""What a user hands in as memory, resolved to (address, length, device, readonly, keepalive).

Any thread; called once per registration, never per transfer. Understands torch tensors, everything with the buffer
protocol (numpy, bytearray, memoryview, mmap, array) and DLPack. Nothing is copied and nothing is imported that the
caller did not import already.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

HOST = -1
"""Device number of host memory; other numbers are CUDA ordinals."""
SOME_GPU = -2
"""Memory of a GPU whose number its owner does not report; the driver knows."""

_DLPACK_CPU = 1
_DLPACK_CUDA = 2
_PYBUF_FULL_RO = 0x011C


class ResolvedBuffer(NamedTuple):
    """Memory as the engine wants it. `keepalive` owns the memory and must outlive the registration."""

    address: int
    length: int
    device: int
    readonly: bool
    keepalive: object


class _PyBuffer(ctypes.Structure):
    """CPython's Py_buffer; only `buf` is read."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


Border = Callable[[object], tuple[int, int, int, bool, object]]
"""The compiled resolver, which needs neither torch nor numpy for DLPack."""


def resolve_buffer(buffer: object, border: Border | None = None) -> ResolvedBuffer:
    """Return where the bytes of `buffer` are; by the compiled border where there is one.

    Raises:
        TypeError: it is no tensor, no buffer and no DLPack object, holds Python objects, or is on an unknown device.
        ValueError: it is empty or not contiguous.
    """
    name = type(buffer).__name__
    torch = sys.modules.get("torch")
    view = None if torch is not None and isinstance(buffer, torch.Tensor) else _view_of(buffer)
    if view is not None and "O" in view.format:
        raise TypeError(f"{name} holds Python objects, not bytes; it cannot be registered")
    if view is None and hasattr(buffer, "__cuda_array_interface__") and not hasattr(buffer, "__dlpack__"):
        resolved = _from_cuda_interface(buffer)
    elif border is not None:
        resolved = ResolvedBuffer(*border(buffer))
    elif view is not None:
        resolved = _from_view(view, name)
    elif torch is not None and isinstance(buffer, torch.Tensor):
        resolved = _from_tensor(buffer)
    else:
        resolved = _from_dlpack(buffer)
    if resolved.length == 0:
        raise ValueError(f"an empty {name} cannot be registered: it has no bytes to reach")
    return resolved


def _view_of(buffer: Any) -> memoryview | None:
    try:
        return memoryview(buffer)
    except TypeError:
        return None


def _from_tensor(tensor: Any) -> ResolvedBuffer:
    kind = tensor.device.type
    if kind not in ("cpu", "cuda"):
        raise TypeError(f"a tensor on device {tensor.device} cannot be registered: host and CUDA memory only")
    if tensor.layout is not sys.modules["torch"].strided or not tensor.is_contiguous():
        raise ValueError(
            f"tensor of shape {tuple(tensor.shape)} and strides {_strides(tensor)} is not contiguous;"
            " register tensor.contiguous(), or the whole tensor that it is a view of"
        )
    device = HOST if kind == "cpu" else int(tensor.device.index or 0)
    length = tensor.numel() * tensor.element_size()
    # The detached twin owns the same storage and survives `tensor.data = other`.
    return ResolvedBuffer(tensor.data_ptr() if length else 0, length, device, False, tensor.detach())


def _strides(tensor: Any) -> object:
    return tuple(tensor.stride()) if tensor.layout is sys.modules["torch"].strided else tensor.layout


def _from_view(view: memoryview, name: str) -> ResolvedBuffer:
    if not view.c_contiguous:
        raise ValueError(
            f"{name} of shape {view.shape} and strides {view.strides} is not C-contiguous;"
            " register a contiguous copy, or the whole buffer that it is a view of"
        )
    if view.nbytes == 0:
        return ResolvedBuffer(0, 0, HOST, view.readonly, view)
    filled = _PyBuffer()
    get, release = ctypes.pythonapi.PyObject_GetBuffer, ctypes.pythonapi.PyBuffer_Release
    if get(ctypes.py_object(view), ctypes.byref(filled), _PYBUF_FULL_RO) != 0:
        raise TypeError(f"{name} refused to show its memory")
    try:
        address = int(filled.buf)
    finally:
        release(ctypes.byref(filled))
    # The view stays exported, so a bytearray cannot be resized under the NIC.
    return ResolvedBuffer(address, view.nbytes, HOST, view.readonly, view)


def _from_cuda_interface(buffer: Any) -> ResolvedBuffer:
    """Read version 2 or 3 of the CUDA array interface; it names no device, so `__dlpack_device__` does, if there."""
    facts = buffer.__cuda_array_interface__
    shape, strides, size = tuple(facts["shape"]), facts.get("strides"), int(facts["typestr"][2:])
    dense, expected = [], size
    for side in reversed(shape):
        dense.append(expected)
        expected *= side
    length = math.prod(shape) * size
    if length and strides is not None and tuple(strides) != tuple(reversed(dense)):
        raise ValueError(
            f"{type(buffer).__name__} of shape {shape} and strides {tuple(strides)} is not C-contiguous;"
            " register a contiguous copy, or the whole array that it is a view of"
        )
    address, readonly = facts["data"]
    device = SOME_GPU
    if hasattr(buffer, "__dlpack_device__"):
        kind, ordinal = buffer.__dlpack_device__()
        device = int(ordinal) if int(kind) == _DLPACK_CUDA else SOME_GPU
    return ResolvedBuffer(int(address), length, device, bool(readonly), buffer)


def _from_dlpack(buffer: Any) -> ResolvedBuffer:
    name = type(buffer).__name__
    if not hasattr(buffer, "__dlpack__") or not hasattr(buffer, "__dlpack_device__"):
        raise TypeError(
            f"cannot register {name}: give a tensor, an ndarray, a bytearray, a writable memoryview, or a DLPack object"
        )
    kind, ordinal = buffer.__dlpack_device__()
    if int(kind) not in (_DLPACK_CPU, _DLPACK_CUDA):
        raise TypeError(
            f"{name} is on DLPack device ({int(kind)}, {ordinal}); only cpu (1) and cuda (2) are understood"
        )
    torch = sys.modules.get("torch")
    if torch is not None:
        return _from_tensor(torch.from_dlpack(buffer))._replace(keepalive=buffer)
    if int(kind) == _DLPACK_CUDA:
        raise TypeError(f"registering {name} from a GPU needs torch to be imported")
    import numpy as np

    array: Any = np.from_dlpack(buffer)
    return _from_view(memoryview(array), name)
