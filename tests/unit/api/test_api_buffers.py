"""Both resolvers, the one in Python and the compiled one, state the same about the same memory."""

from __future__ import annotations

import array
import gc
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from asyncfabric._bridge.buffers import SOME_GPU, ResolvedBuffer, resolve_buffer

Resolve = Callable[[object], ResolvedBuffer]


@pytest.fixture(params=["python", "compiled"])
def resolve(request: pytest.FixtureRequest) -> Resolve:
    if request.param == "python":
        return resolve_buffer
    from asyncfabric._bridge.native import resolve_native_buffer

    try:
        import asyncfabric._native  # noqa: F401  # the test is whether it can be imported
    except ImportError as missing:
        pytest.skip(f"THE COMPILED HALF OF THIS TEST DID NOT RUN: {missing}")
    return resolve_native_buffer


@pytest.mark.parametrize(
    ("make", "length", "readonly"),
    [
        (lambda: bytearray(7), 7, False),
        (lambda: b"1234567", 7, True),
        (lambda: memoryview(bytearray(9))[2:5], 3, False),
        (lambda: array.array("d", [1, 2]), 16, False),
        (lambda: np.zeros((3, 5), np.float32), 60, False),
        (lambda: np.broadcast_to(np.uint8(1), 1), 1, True),
        (lambda: np.zeros((4, 4))[1:3], 64, False),
        (lambda: torch.zeros(3, 5, dtype=torch.bfloat16), 30, False),
        (lambda: torch.zeros(4, 4)[2:], 32, False),
        (lambda: torch.nn.Parameter(torch.zeros(4)), 16, False),
    ],
)
def test_address_length_and_rights(resolve: Resolve, make: Callable[[], Any], length: int, readonly: bool) -> None:
    buffer = make()
    resolved = resolve(buffer)
    assert (resolved.length, resolved.device, resolved.readonly) == (length, -1, readonly)
    expected = buffer.data_ptr() if isinstance(buffer, torch.Tensor) else np.frombuffer(buffer, np.uint8).ctypes.data
    assert resolved.address == expected


@pytest.mark.parametrize(
    ("buffer", "error"),
    [
        (bytearray(), ValueError),
        (torch.empty(0, 4), ValueError),
        (np.zeros((4, 4)).T[:, :2], ValueError),
        (np.zeros(4)[::-1], ValueError),
        (torch.zeros(4, 4).t(), ValueError),
        (torch.empty(4, device="meta"), TypeError),
        (np.array([object()]), TypeError),
        ("text", TypeError),
        (None, TypeError),
        ([1, 2], TypeError),
    ],
)
def test_what_cannot_be_registered(resolve: Resolve, buffer: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        resolve(buffer)


def test_memory_stays_while_the_keepalive_is_held(resolve: Resolve) -> None:
    buffer = bytearray(b"stay")
    resolved = resolve(buffer)
    with pytest.raises(BufferError):
        buffer.extend(b"!")
    del resolved
    gc.collect()
    buffer.extend(b"!")


def test_a_tensor_may_get_other_data_meanwhile(resolve: Resolve) -> None:
    tensor = torch.full((4,), 7, dtype=torch.uint8)
    resolved = resolve(tensor)
    tensor.data = torch.zeros(4, dtype=torch.uint8)
    gc.collect()
    import ctypes

    assert ctypes.string_at(resolved.address, 4) == b"\x07" * 4


class OnTheGpu:
    """Memory of a GPU as the CUDA array interface shows it, and the number of the GPU as DLPack names it."""

    __cuda_array_interface__: ClassVar[dict[str, object]] = {
        "shape": (12,),
        "typestr": "|u1",
        "data": (1 << 40, False),
        "version": 3,
    }

    def __init__(self, kind: int, ordinal: int) -> None:
        self._place = (kind, ordinal)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._place


def test_the_cuda_array_interface_takes_the_device_from_dlpack(resolve: Resolve) -> None:
    assert resolve(OnTheGpu(2, 3))[:4] == (1 << 40, 12, 3, False)
    assert resolve(OnTheGpu(13, 3))[:4] == (1 << 40, 12, SOME_GPU, False)
