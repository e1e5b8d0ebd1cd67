"""TorchDevice: bytes of weights in a GPU's memory, and what works on them there; they never pass through the host.

Each thread has a stream of its own, so that measuring, converting and hashing wait for nothing but themselves. What is
begun is queued there; only maxima and checksums come to the host. With the device "cpu" the same code runs on host
memory, for tests.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncfabric import Region
from asyncfabric.weights.memory.checksums import ChecksumKind
from asyncfabric.weights.memory.device import Measured, PlacedBox, Root, Stretch, Summing, Sums, added
from asyncfabric.weights.memory.gpu.arithmetic import BITS, BY_BYTES, block_maxima, box_scales, convert, sizes_of
from asyncfabric.weights.memory.gpu.boxes import KernelBox, kernel_box, laying_boxes
from asyncfabric.weights.memory.gpu.kernels import WeightKernels
from asyncfabric.weights.memory.gpu.sums import BroughtSums, KernelSums, PackedSums, TorchSums, packed
from asyncfabric.weights.memory.tiles import Floats
from asyncfabric.weights.plan.boxes import Ints
from asyncfabric.weights.plan.formats import BLOCK
from asyncfabric.weights.plan.parts import MoveKind


class TorchDevice:
    """The memory of one GPU, with torch."""

    checksum: ChecksumKind = "words"
    unit_bytes: int = 264 << 20  # four boxes of 64 MiB, and their scales
    first_unit_bytes: int | None = 32 << 20
    last_unit_bytes: int | None = None  # receivers are notified ahead, and check at the speed of their memory
    fills: int = 2  # while one waits for the GPU another one is made ready
    checks: int = 4  # they are queued behind each other
    measures: int = 32
    queues: bool = True

    def __init__(self, name: str) -> None:
        """Work on a device, "cuda:N"."""
        self.name: str = name
        self._device = torch.device(name)
        self._streams = threading.local()
        self._kernels: WeightKernels | None = WeightKernels(self._device) if self._device.type == "cuda" else None

    def memory_of(self, region: Region) -> Tensor:
        """Return the bytes of a region."""
        return region.tensor(torch.uint8)

    def address(self, memory: Tensor) -> int:
        """Return where a tensor begins."""
        return memory.data_ptr()

    def window(self, address: int, length_bytes: int) -> Tensor:
        """Return a tensor over memory by its address."""
        if self._device.type == "cpu":
            return torch.frombuffer((ctypes.c_uint8 * length_bytes).from_address(address), dtype=torch.uint8)
        return torch.as_tensor(_Window(address, length_bytes), device=self._device)

    def held(self, given: Any, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """Return the bits of a tensor, of the local part of a DTensor."""
        local = given.to_local() if hasattr(given, "to_local") else given
        name = str(local.dtype).removeprefix("torch.")
        if name != dtype or local.numel() != prod(shape) or not local.is_contiguous():
            raise ValueError(
                f"expected contiguous {shape} of {dtype}, got {tuple(local.shape)} of {name}"
                f"{'' if local.is_contiguous() else ', not contiguous'}"
            )
        bits: Tensor = local.detach().view(BITS[dtype])
        return bits

    def brought(self, given: Any) -> Tensor:
        """Return on the GPU what a callback brought, arrays too."""
        tensor = given if isinstance(given, Tensor) else torch.from_numpy(np.ascontiguousarray(given))
        with self.working():
            return tensor.view(BY_BYTES[tensor.element_size()]).to(self._device)

    def root(self, elements: Tensor) -> Root:
        """Return all bytes of a tensor's storage."""
        storage = elements.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=elements.device).set_(storage)
        return Root(whole, storage.data_ptr(), elements.data_ptr() - storage.data_ptr())

    def after_caller(self) -> Callable[[], None] | None:
        """Return what waits for the stream that is current on the calling thread."""
        return None if self._device.type == "cpu" else torch.cuda.current_stream(self._device).synchronize

    def measure(self, shards: Sequence[Measured]) -> list[Floats]:
        """Return the maxima of blocks; they come to the host together."""
        with self.working():
            if self._kernels is None or any(shard.stride(-1) != 1 for shard, _, _ in shards):
                return [block_maxima(*one) for one in shards]
            begun = [self._maxima(self._kernels, *one) for one in shards]
            brought = torch.cat([found.view(-1) for found in begun]).cpu().numpy()
            cuts = np.cumsum([found.numel() for found in begun])[:-1]
            parts = zip(np.split(brought, cuts), begun, shards, strict=True)
            return [sizes_of(part.reshape(found.shape), kind.dtype) for part, found, (_, _, kind) in parts]

    def convert(
        self,
        out: Tensor,
        sizes: Sequence[int],
        axes: Sequence[int],
        box: Tensor,
        kind: MoveKind,
        maxima: Floats | None,
        start: Ints,
        origin: Ints,
    ) -> None:
        """Convert strip by strip; scales come from the host, where they are divided."""
        with self.working():
            scales = None
            if maxima is not None:
                scales = self._upload(box_scales(maxima, start, tuple(box.shape), origin))
            target = out.view(BITS[kind.to]).view(tuple(sizes)).permute(tuple(axes))
            if scales is not None and self._kernels is not None and box.stride(-1) == 1:
                self._quantise(self._kernels, target, box, kind, scales, start)
            else:
                convert(target, box, kind, scales, start)

    def described(
        self, box: Tensor, kind: MoveKind, sizes: Sequence[int], axes: Sequence[int], scale_axes: Sequence[int]
    ) -> KernelBox | None:
        """Return how a kernel takes a box; it is by its addresses, so the box stays where it is."""
        return None if self._kernels is None else kernel_box(box, kind, sizes, axes, scale_axes)

    def laying(self, boxes: Sequence[PlacedBox]) -> Callable[[], None]:
        """Return what launches once for all boxes of a kind."""
        launches = [] if self._kernels is None else laying_boxes(self._kernels, boxes)

        def lay() -> None:
            with self.working():
                for launch in launches:
                    launch()

        return lay

    def summing(self, kind: ChecksumKind, stretches: Sequence[Sequence[Stretch]]) -> Summing:
        """Return what works out checksums, described to the kernel once; one by one where it cannot read some."""
        if kind == "words" and self._kernels is not None:
            table = packed(stretches)
            if table is not None:
                kernels = self._kernels
                return lambda numbers: _OnStream(self, PackedSums(kernels, table, numbers))
        return lambda numbers: added(self.sums(kind), stretches, numbers)

    def put(self, out: Tensor, data: np.ndarray) -> None:
        """Copy bytes of the host."""
        with self.working():
            out.copy_(self._pinned(np.ascontiguousarray(data).reshape(-1).view(np.uint8)), non_blocking=True)

    def gather(self, out: Tensor, part: Stretch) -> None:
        """Put a stretch in order."""
        with self.working():
            out.copy_(self._gathered(part))

    def sums(self, kind: ChecksumKind) -> Sums:
        """Return what works out checksums; it is used by this thread."""
        if kind != "words":
            return _OnStream(self, BroughtSums(self._gathered, kind))
        if self._kernels is None:
            return _OnStream(self, TorchSums(self._gathered))
        return _OnStream(self, KernelSums(self._kernels, self._gathered))

    @contextmanager
    def working(self) -> Iterator[None]:
        """Make the stream of this thread torch's current one."""
        if self._device.type == "cpu" or getattr(self._streams, "current", False):
            yield
            return
        self._streams.current = True
        try:
            with torch.cuda.stream(self._stream()):
                yield
        finally:
            self._streams.current = False

    def after(self) -> object:
        """Return the stream of this thread."""
        return None if self._device.type == "cpu" else self._stream()

    def mark(self) -> Any:
        """Return an event on the stream of this thread."""
        if self._device.type == "cpu":
            return monotonic()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream())
        return event

    def seconds(self, first: Any, second: Any) -> float:
        """Return what the GPU took from one event to another."""
        if self._device.type == "cpu":
            return float(second - first)
        second.synchronize()
        return float(first.elapsed_time(second)) / 1e3

    def finish(self) -> None:
        """Wait for the stream of this thread."""
        if self._device.type != "cpu":
            self._stream().synchronize()

    # ---- inside

    def _quantise(
        self, kernels: WeightKernels, target: Tensor, box: Tensor, kind: MoveKind, scales: Tensor, start: Ints
    ) -> None:
        """By the kernel, which writes rows one after the other; turned round afterwards where that is not wanted."""
        ordered = target if target.is_contiguous() else torch.empty(box.shape, dtype=torch.uint8, device=box.device)
        row, column = int(start[-2]) % BLOCK, int(start[-1]) % BLOCK
        for at in _cubes(box):
            kernels.quantise(box[at], kind.dtype, row, column, scales[at], ordered[at])
        if ordered is not target:
            target.copy_(ordered)

    def _gathered(self, part: Stretch) -> Tensor:
        memory, lies, at = part
        if lies.run_bytes == lies.nbytes:
            return memory[at : at + lies.nbytes]  # type: ignore[no-any-return]
        bits = memory[: memory.numel() // lies.item * lies.item].view(BY_BYTES[lies.item])
        strides = [step // lies.item for step in lies.strides]
        ordered = torch.as_strided(bits, lies.sizes, strides, bits.storage_offset() + at // lies.item).contiguous()
        return ordered.view(-1).view(torch.uint8)

    def _maxima(self, kernels: WeightKernels, shard: Tensor, start: Ints, kind: MoveKind) -> Tensor:
        row, column = int(start[-2]) % BLOCK, int(start[-1]) % BLOCK
        blocks = (-(-(row + shard.shape[-2]) // BLOCK), -(-(column + shard.shape[-1]) // BLOCK))
        parts = [kernels.maxima(shard[at], kind.dtype, row, column, blocks) for at in _cubes(shard)]
        return (parts[0] if len(parts) == 1 else torch.stack(parts)).view(*shard.shape[:-2], *blocks)

    def _upload(self, values: np.ndarray) -> Tensor:
        return self._pinned(np.ascontiguousarray(values)).to(self._device, non_blocking=True)

    def _pinned(self, values: np.ndarray) -> Tensor:
        """Return values where a GPU fetches them without anybody waiting; torch keeps the pages until it has."""
        given = torch.from_numpy(values)
        return given if self._device.type == "cpu" else given.pin_memory()

    def _stream(self) -> Any:
        stream = getattr(self._streams, "stream", None)
        if stream is None:
            stream = self._streams.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return stream


class _Window:
    """Memory of a GPU by its address, as torch takes it."""

    def __init__(self, address: int, length_bytes: int) -> None:
        about = {"shape": (length_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = about


def _cubes(box: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield what to index a box with, so that it has three dimensions each time."""
    if box.dim() == 2:
        yield (None,)
    else:
        yield from np.ndindex(*box.shape[:-3])


class _OnStream:
    """Checksums that are worked out on the stream of the thread that asks for them."""

    def __init__(self, device: TorchDevice, sums: Sums) -> None:
        self._device = device
        self._sums = sums

    def add(self, parts: Sequence[Stretch]) -> None:
        """Begin one."""
        with self._device.working():
            self._sums.add(parts)

    def begin(self) -> None:
        """Begin all."""
        with self._device.working():
            self._sums.begin()

    def ready(self) -> bool:
        """Return whether nobody would wait."""
        return self._sums.ready()

    def result(self) -> list[int]:
        """Wait for all."""
        with self._device.working():
            return self._sums.result()
