"""Kernels of weights: the text that the package carries, compiled by the driver, and what they are launched with.

Any thread, on torch's current stream. The structs are those of native/cuda/weights/kernels.cu.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import c_uint32, c_uint64
from functools import cache, partial
from importlib import resources
from typing import Any, ClassVar

import torch
from torch import Tensor

from asyncfabric._gpu import Driver, Function, Module, open_driver

THREADS = 256

OUTER = 4
"""Dimensions that lead from run to run, at most."""

STRETCH = struct.Struct("<3Q4Q4I4I")
"""weights::Stretch: address, words, place, strides, sizes, words of a run, which checksum, tail, vectors."""

WHOLE = struct.Struct("<4Q3QQ3Q6I")
"""weights::Whole: source, its strides, out, its strides, scales, their strides, rows, columns, tiles, first, 0."""

STRETCHES, WHOLES = 40, 32
"""What the parameters of one launch hold."""

WORDS_OF_A_BLOCK = 16 * THREADS

MOST_BLOCKS = 2048

LEAST_TOTALS = 4096

LATEST = 512


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
    return resources.files("asyncfabric.weights.memory.gpu").joinpath("_generated/kernels.ptx").read_bytes()


class Brought:
    """Numbers that a GPU writes to the host, behind what is on torch's current stream now."""

    def __init__(self, numbers: Tensor, event: Any) -> None:
        self._numbers = numbers
        self._event = event

    def ready(self) -> bool:
        """Return whether they are here."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> list[int]:
        """Return them once they are here; on any thread."""
        if self._event is not None:
            self._event.synchronize()
        found: list[int] = self._numbers.tolist()
        return found


class WeightKernels:
    """The kernels of one device; they stay loaded as long as the process."""

    def __init__(self, device: torch.device, launch: Launch | None = None) -> None:
        """Let the driver compile them for a device.

        Raises:
            DeviceError: there is no driver, or it does not compile them.
        """
        self._device = device
        self._threads = threading.local()
        self._latest: deque[Tensor] = deque(
            maxlen=LATEST
        )  # of updates that were given up too: a launch may still write
        self._launch: Launch = launch or _loaded(device)

    def sums(self, stretches: bytes, most_words: int, count: int) -> Brought:
        """Begin checksums.

        Args:
            stretches: of STRETCH, one behind the other; each names the checksum that it is a part of.
            most_words: of a stretch.
            count: of the checksums.

        Returns: the sums of products, not finished, on their way to the host.
        """
        totals = self._totals(count)
        blocks = min(MOST_BLOCKS, max(1, most_words // WORDS_OF_A_BLOCK))
        whole = STRETCHES * STRETCH.size
        for low in range(0, len(stretches), whole):
            part = stretches[low : low + whole]
            reported = ctypes.create_string_buffer(part, whole)
            self._launch("sums", (blocks, len(part) // STRETCH.size), [reported, c_uint64(totals.data_ptr())])
        on_gpu = self._device.type == "cuda"
        out = torch.empty(count, dtype=torch.int64, pin_memory=on_gpu)
        numbers = [c_uint64(totals.data_ptr()), c_uint64(out.data_ptr()), c_uint32(count)]
        self._launch("bring", (-(-count // THREADS), 1), numbers)
        event = None
        if on_gpu:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._latest.append(out)
        return Brought(out, event)

    def laying(self, kernel: str, boxes: Sequence[bytes], tiles: int) -> Callable[[], None]:
        """Return what begins to lay at most WHOLES boxes, of WHOLE and of so many tiles: "whole_..." or "lay_..."."""
        reported = [ctypes.create_string_buffer(b"".join(boxes), WHOLES * WHOLE.size), c_uint32(len(boxes))]
        return partial(self._launch, kernel, (tiles, 1), reported)

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
        """Begin to quantise a box, which is described as in `maxima`.

        `scales` are float32 (leads, block rows, block columns), contiguous, of the blocks that the box touches; `out`
        is uint8, contiguous, in the shape of the box.
        """
        words = _matrices(box, row, column, (scales.shape[-2], scales.shape[-1]), scales.data_ptr(), out)
        blocks = -(-box.numel() // (8 if words.vector else 1) // THREADS)
        self._launch(f"quantise_{dtype}", (max(1, min(1 << 16, blocks)), 1), [words])

    def _totals(self, count: int) -> Tensor:
        """Return zeros of this thread, which has one stream: who adds to them leaves zeros behind."""
        held: Tensor | None = getattr(self._threads, "totals", None)
        if held is None or held.numel() < count:
            held = torch.zeros(max(count, LEAST_TOTALS), dtype=torch.int64, device=self._device)
            self._threads.totals = held
        return held


@cache
def _loaded(device: torch.device) -> Launch:
    """Return the kernels of a device: the driver takes seconds to compile them, so once for a process."""
    return _Loaded(open_driver(), device)


class _Loaded:
    """The kernels, loaded by the driver; launched where the device's context is current."""

    def __init__(self, driver: Driver, device: torch.device) -> None:
        self._device = device
        self._functions: dict[str, Function] = {}
        with torch.cuda.device(device):
            torch.zeros(1, dtype=torch.int32, device=device)  # so that the device's context is current on this thread
            self._module = Module(driver, kernel_text())

    def __call__(self, name: str, grid: tuple[int, int], arguments: list[Any]) -> None:
        found = self._functions.get(name)
        if found is None:
            found = self._functions[name] = self._module.function(f"weights_{name}")
        found.launch(grid, THREADS, torch.cuda.current_stream(self._device).cuda_stream, arguments)


def _matrices(box: Tensor, row: int, column: int, blocks: tuple[int, int], scales: int, out: Tensor) -> Matrices:
    leads, rows, columns = box.shape
    lead_stride, row_stride, _ = box.stride()
    whole = all(number % 8 == 0 for number in (lead_stride, row_stride, columns, column))
    vector = whole and box.data_ptr() % 16 == 0 and out.data_ptr() % 8 == 0
    return Matrices(
        box.data_ptr(),
        lead_stride,
        row_stride,
        scales,
        out.data_ptr(),
        leads,
        rows,
        columns,
        row,
        column,
        *blocks,
        vector,
    )
