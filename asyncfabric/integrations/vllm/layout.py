"""Where the blocks of each layer lie in registered memory, read from the strides of vLLM's tensors and never assumed.

Worker side. What two engines compare before a byte moves is here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import msgspec
import torch

from asyncfabric.blocking import Fabric, Region
from asyncfabric.integrations.torch_memory import storage_bytes, storage_range


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A part of a layer's blocks: block b is `page_bytes` of every layout from `offset + b * stride` of a region on."""

    region: int
    offset: int
    stride: int


class WorkerLayout(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of one worker.

    Attributes:
        shape: names and values that must be equal at both engines.
        keys: rights to write the regions, in bytes.
        layers: for each layer its pieces; most layouts have one.
    """

    shape: dict[str, str]
    keys: list[bytes]
    layers: list[list[Piece]]

    def differences(self, other: WorkerLayout) -> str:
        """Return the names that differ with both values, or nothing."""
        names = sorted(self.shape.keys() | other.shape.keys())
        return ", ".join(
            f"{name} {self.shape.get(name)} here and {other.shape.get(name)} there"
            for name in names
            if self.shape.get(name) != other.shape.get(name)
        )


@dataclass(frozen=True)
class WorkerBlocks:
    """The blocks of this worker: the layout that others get, and what writes out of them need."""

    layout: WorkerLayout
    regions: list[Region]
    page_bytes: int
    names: dict[str, int]
    on_gpu: bool


def read_blocks(
    fabric: Fabric, caches: Mapping[str, torch.Tensor], count: int, tokens: int, ranks: int
) -> WorkerBlocks:
    """Register the memory behind the tensors of all layers and return where their blocks are.

    Args:
        fabric: of this worker.
        caches: the tensor of each layer, by its name.
        count: how many blocks each has.
        tokens: tokens of a block.
        ranks: workers of the engine.

    Raises:
        ValueError: a tensor without a dimension of `count`, or layers whose blocks differ in size or order.
        DeviceError: the memory cannot be registered.
    """
    regions: dict[tuple[str, int, int], int] = {}
    opened: list[Region] = []
    layers: list[list[Piece]] = []
    orders: set[tuple[int, str]] = set()
    for name, tensor in caches.items():
        memory = storage_range(tensor)
        if memory not in regions:
            regions[memory] = len(opened)
            opened.append(fabric.register(storage_bytes(tensor), access="write"))
        begin = tensor.data_ptr() - memory.address
        pieces, page_bytes, order = _pieces(name, tensor, count)
        layers.append([Piece(regions[memory], begin + offset, stride) for offset, stride in pieces])
        orders.add((page_bytes, order))
    if len(orders) != 1:
        raise ValueError(f"blocks of all layers must have one size and one order, found {sorted(orders)}")
    page_bytes, order = next(iter(orders))
    shape = {
        "block_bytes": str(page_bytes),
        "block_tokens": str(tokens),
        "block_order": order,
        "layers": str(len(layers)),
        "pieces": str(len(layers[0])),
        "dtype": str(next(iter(caches.values())).dtype),
        "tensor_parallel_size": str(ranks),
    }
    keys = [bytes(region.key("write")) for region in opened]
    names = {name: number for number, name in enumerate(caches)}
    on_gpu = next(iter(caches.values())).device.type != "cpu"
    return WorkerBlocks(WorkerLayout(shape, keys, layers), opened, page_bytes, names, on_gpu)


def _pieces(name: str, tensor: torch.Tensor, count: int) -> tuple[list[tuple[int, int]], int, str]:
    """Return (offset, stride) of each piece in bytes, the bytes of a block in it, and the order within a block."""
    sizes, steps, width = list(tensor.shape), list(tensor.stride()), tensor.element_size()
    if count not in sizes:
        raise ValueError(
            f"layer {name}: none of the dimensions {tuple(sizes)} is the {count} blocks of the KvCache; "
            "kernels whose blocks are smaller than the scheduler's are not supported"
        )
    at = sizes.index(count)
    step = steps[at]
    inner = [(stride, size) for d, (size, stride) in enumerate(zip(sizes, steps, strict=True)) if d != at and size > 1]
    outer = [(stride, size) for stride, size in inner if stride > step]
    inner = sorted(pair for pair in inner if pair[0] < step)
    dense = 1
    for stride, size in inner:
        if stride != dense:
            raise ValueError(f"layer {name}: a block of strides {tuple(steps)} has gaps, which is not supported")
        dense *= size
    offsets = [0]
    for stride, size in outer:
        offsets = [offset + number * stride for offset in offsets for number in range(size)]
    order = "x".join(f"{size}" for _, size in reversed(inner))
    assert dense * len(offsets) * count == prod(sizes)
    return [(offset * width, step * width) for offset in offsets], dense * width, f"{order} of {_logical(tensor, at)}"


def _logical(tensor: torch.Tensor, at: int) -> str:
    """Return the order of dimensions in memory, which distinguishes HND from NHD where sizes are equal."""
    dimensions = [d for d in range(tensor.dim()) if d != at]
    return "".join(str(d) for d in sorted(dimensions, key=tensor.stride, reverse=True))


After = Callable[[], object]
"""Returns what a write has to wait for: the stream that computes, or None on the CPU."""
