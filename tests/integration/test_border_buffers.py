"""The compiled border's buffers: what users hold becomes (address, length, device); nothing is copied or can move."""

from __future__ import annotations

import array
import ctypes
import gc
import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest

native = pytest.importorskip("asyncfabric._native", reason="THE BORDER WAS NOT TESTED: run `make build`")
torch = pytest.importorskip("torch")


class Foreign:
    """A tensor of some other framework: nothing but DLPack."""

    def __init__(self, tensor: Any, *, versioned: bool) -> None:
        self.tensor = tensor
        self.versioned = versioned

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        if options and not self.versioned:
            raise TypeError("an old producer does not know max_version")
        return self.tensor.__dlpack__(**options)


class Elsewhere:
    """A producer on a device that nobody here knows (Metal)."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (8, 0)

    def __dlpack__(self) -> object:
        raise AssertionError("must be refused before it is asked for memory")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.complex64, torch.bool])
def test_torch_tensors_of_any_dtype(dtype: Any) -> None:
    tensor = torch.zeros((3, 5), dtype=dtype)
    found = native.resolve_buffer(tensor)
    assert found[:4] == (tensor.data_ptr(), 15 * tensor.element_size(), -1, False)


def test_a_tensor_view_starts_where_its_data_starts() -> None:
    tensor = torch.arange(100, dtype=torch.int64)
    assert native.resolve_buffer(tensor[40:60])[:2] == (tensor.data_ptr() + 320, 160)


@pytest.mark.parametrize(
    "make",
    [
        bytearray,
        bytes,
        lambda n: memoryview(bytearray(n)),
        lambda n: np.zeros(n, np.uint8),
        lambda n: array.array("B", bytes(n)),
        lambda n: (ctypes.c_uint8 * n)(),
    ],
)
def test_exporters_of_the_buffer_protocol(make: Any) -> None:
    owner = make(96)
    found = native.resolve_buffer(owner)
    assert (found.length_bytes, found.device, found.readonly) == (96, -1, isinstance(owner, bytes))
    assert ctypes.string_at(found.address, 96) == bytes(owner)
    if not found.readonly:
        ctypes.memset(found.address + 95, 7, 1)
        assert bytes(owner)[95] == 7


def test_a_read_only_array_is_known_as_one() -> None:
    owner = np.zeros(8)
    owner.flags.writeable = False
    assert native.resolve_buffer(owner).readonly
    assert native.resolve_buffer(memoryview(b"abc")).readonly


@pytest.mark.parametrize("versioned", [False, True])
def test_dlpack_of_both_ages(versioned: bool) -> None:
    tensor = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    found = native.resolve_buffer(Foreign(tensor, versioned=versioned))
    assert found[:4] == (tensor.data_ptr(), 96, -1, False)
    with pytest.raises(ValueError, match=r"shape \(4, 3, 2\) and strides \(1, 4, 12\) elements"):
        native.resolve_buffer(Foreign(tensor.permute(2, 1, 0), versioned=versioned))


def test_dlpack_memory_lives_while_it_is_held() -> None:
    owner = np.arange(1000.0)
    gone = weakref.ref(owner)
    found = native.resolve_buffer(Foreign(owner, versioned=True))
    del owner
    gc.collect()
    assert gone() is not None
    assert ctypes.string_at(found.address, 16) == np.arange(2.0).tobytes()
    del found
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("owner", "text"),
    [
        (np.zeros((4, 4))[:, 1], r"shape \(4,\) and strides \(32,\) bytes"),
        (np.zeros((4, 4), order="F"), r"shape \(4, 4\) and strides \(8, 32\) bytes"),
        (memoryview(bytearray(9))[::2], r"strides \(2,\) bytes"),
        (torch.zeros(4, 5).t(), r"shape \(5, 4\) and strides \(1, 5\) elements"),
    ],
)
def test_memory_with_gaps_is_refused_with_its_strides(owner: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        native.resolve_buffer(owner)


@pytest.mark.parametrize(
    "owner", [3, None, [1, 2], "text", object(), Elsewhere(), torch.zeros(2, device="meta"), torch.eye(2).to_sparse()]
)
def test_what_has_no_memory_is_refused_by_type(owner: object) -> None:
    with pytest.raises(TypeError):
        native.resolve_buffer(owner)


def test_a_held_bytearray_cannot_move() -> None:
    owner = bytearray(64)
    found = native.resolve_buffer(owner)
    with pytest.raises(BufferError):
        owner.extend(b"more")
    del found
    owner.extend(b"more")


def test_a_held_tensor_survives_set_data() -> None:
    tensor = torch.full((4096,), 3, dtype=torch.uint8)
    found = native.resolve_buffer(tensor)
    tensor.data = torch.zeros(1, dtype=torch.uint8)
    gc.collect()
    assert ctypes.string_at(found.address, 4096) == bytes([3]) * 4096


def test_torch_is_not_imported_for_those_who_do_not_use_it() -> None:
    program = (
        "import sys; from asyncfabric._native import resolve_buffer as r; r(bytearray(1)); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
