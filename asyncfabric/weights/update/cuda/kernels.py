"""Kernels of weights: the text that the package carries, compiled by the driver, and what they are launched with.

Any thread, on torch's current stream. The structs are those of native/cuda/weights/kernels.cu.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_uint32, c_uint64, c_void_p
from importlib import resources
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncfabric._cuda_driver import Driver, open_driver

THREADS = 256
OUTER = 4
"""Dimensions that lead from run to run, at most."""

STRETCH = np.dtype([
    ("address", "<u8"), ("words", "<u8"), ("place", "<u8"), ("stride", "<u8", OUTER), ("size", "<u4", OUTER),
    ("run_words", "<u4"), ("sum", "<u4"), ("tail", "<u4"), ("vector", "<u4"),
])  # fmt: skip
"""weights::Stretch."""

WHOLE = np.dtype([
    ("source", "<u8"), ("lead_stride", "<u8"), ("row_stride", "<u8"), ("out", "<u8"), ("out_strides", "<u8", 3),
    ("scales", "<u8"), ("scale_strides", "<u8", 3), ("rows", "<u4"), ("columns", "<u4"), ("block_rows", "<u4"),
    ("block_columns", "<u4"), ("first", "<u4"), ("spare", "<u4"),
])  # fmt: skip
"""weights::Whole."""

WORDS_OF_A_BLOCK = 16 * THREADS
MOST_BLOCKS = 2048
MOST_STRETCHES = 65535


class Matrices(ctypes.Structure):
    """weights::Matrices."""

    _fields_: ClassVar = [
        *((name, c_uint64) for name in ("source", "lead_stride", "row_stride", "scales", "out")),
        *((name, c_uint32) for name in ("leads", "rows", "columns", "row", "column")),
        *((name, c_uint32) for name in ("block_rows", "block_columns", "vector")),
    ]


Launch = Callable[[str, "tuple[int, int]", "list[Any]"], None]
"""Launches a kernel by name: on a grid, with arguments of ctypes."""


def kernel_text() -> bytes:
    """Return the kernels as PTX."""
    return resources.files("asyncfabric.weights.update.cuda").joinpath("kernels.ptx").read_bytes()


class Brought:
    """Numbers of a GPU on their way to the host, behind what is on torch's current stream now."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._event: Any = None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[int]:
        """Return them once they are here; on any thread."""
        if self._event is not None:
            self._event.synchronize()
        found: list[int] = self._numbers.tolist()
        return found


class Kernels:
    """The kernels of one device; they stay loaded as long as the process."""

    def __init__(self, device: torch.device, launch: Launch | None = None) -> None:
        """Let the driver compile them for a device.

        Raises:
            DeviceError: there is no driver, or it does not compile them.
        """
        self._device = device
        self._launch: Launch = launch or _Loaded(open_driver(), device)

    def sums(self, stretches: np.ndarray, count: int) -> Brought:
        """Begin checksums.

        Args:
            stretches: of STRETCH; `sum` says which checksum each is a part of.
            count: of the checksums.

        Returns: the sums of products, not finished, on their way to the host.
        """
        totals = torch.zeros(count, dtype=torch.int64, device=self._device)
        for low in range(0, len(stretches), MOST_STRETCHES):
            part = stretches[low : low + MOST_STRETCHES]
            told = self._told(part)
            blocks = min(MOST_BLOCKS, max(1, int(part["words"].max()) // WORDS_OF_A_BLOCK))
            self._launch("sums", (blocks, len(part)), [c_uint64(told.data_ptr()), c_uint64(totals.data_ptr())])
        return Brought(totals)

    def lay(self, kernel: str, boxes: NDArray[np.void], tiles: int) -> None:
        """Begin to lay boxes, which are of WHOLE and have so many tiles, by a kernel "whole_..." or "lay_..."."""
        told = self._told(boxes)
        self._launch(kernel, (tiles, 1), [c_uint64(told.data_ptr()), c_uint32(len(boxes))])

    def maxima(self, shard: Tensor, dtype: str, row: int, column: int, blocks: tuple[int, int]) -> Tensor:
        """Begin to find the largest number of each block, as bits without a sign.

        Args:
            shard: bits, (leads, rows, columns), columns side by side.
            dtype: a floating type of `formats`.
            row: of the first element within its block.
            column: the same.
            blocks: rows and columns of blocks that the shard touches.

        Returns: int32 (leads, block rows, block columns).
        """
        found = torch.zeros((shard.shape[0], *blocks), dtype=torch.int32, device=self._device)
        words = _matrices(shard, row, column, blocks, 0, found)
        self._launch(f"maxima_{dtype}", (min(1 << 20, found.numel()), 1), [words])
        return found

    def quantise(self, box: Tensor, dtype: str, row: int, column: int, scales: Tensor, out: Tensor) -> None:
        """Begin to quantise a box, which is told as in `maxima`.

        `scales` are float32 (leads, block rows, block columns), contiguous, of the blocks that the box touches; `out`
        is uint8, contiguous, in the shape of the box.
        """
        words = _matrices(box, row, column, (scales.shape[-2], scales.shape[-1]), scales.data_ptr(), out)
        blocks = -(-box.numel() // (8 if words.vector else 1) // THREADS)
        self._launch(f"quantise_{dtype}", (max(1, min(1 << 16, blocks)), 1), [words])

    def _told(self, structs: NDArray[np.void]) -> Tensor:
        """Return them where a kernel on the current stream reads them."""
        given = torch.from_numpy(structs.view(np.uint8))
        return (given.pin_memory() if self._device.type == "cuda" else given).to(self._device, non_blocking=True)


class _Loaded:
    """The kernels, loaded by the driver; launched where the device's context is current."""

    def __init__(self, driver: Driver, device: torch.device) -> None:
        self._driver = driver
        self._device = device
        self._functions: dict[str, c_void_p] = {}
        self._module = c_void_p()
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # so that the device's context is current on this thread
            driver.call("cuModuleLoadData", byref(self._module), kernel_text())

    def __call__(self, name: str, grid: tuple[int, int], arguments: list[Any]) -> None:
        found = self._functions.get(name)
        pointers = (c_void_p * len(arguments))(*[ctypes.addressof(each) for each in arguments])
        if found is None:
            found = c_void_p()
            self._driver.call("cuModuleGetFunction", byref(found), self._module, f"weights_{name}".encode())
            self._functions[name] = found
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._driver.call("cuLaunchKernel", found, *grid, 1, THREADS, 1, 1, 0, c_void_p(stream), pointers, None)


def _matrices(box: Tensor, row: int, column: int, blocks: tuple[int, int], scales: int, out: Tensor) -> Matrices:
    leads, rows, columns = box.shape
    lead_stride, row_stride, _ = box.stride()
    whole = all(number % 8 == 0 for number in (lead_stride, row_stride, columns, column))
    vector = whole and box.data_ptr() % 16 == 0 and out.data_ptr() % 8 == 0
    return Matrices(
        box.data_ptr(), lead_stride, row_stride, scales, out.data_ptr(), leads, rows, columns, row, column, *blocks,
        vector,
    )  # fmt: skip
