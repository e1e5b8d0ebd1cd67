"""Where the blocks of each layer lie in registered memory, read from the strides of vLLM's tensors and never assumed.

Worker side. What two engines compare before a byte moves is here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import msgspec
import torch

from asyncfabric.blocking import Fabric, Region
from asyncfabric.integrations.torch_memory import storage_bytes, storage_range
from asyncfabric.kv import KvLayout


class WorkerRank(NamedTuple):
    """A worker in its engine: its rank of how many, and the heads of keys and values of the whole model."""

    rank: int
    ranks: int
    kv_heads: int


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A part of a layer's blocks: block b is `page_bytes` of every layout from `offset + b * stride` of a region on."""

    region: int
    offset: int
    stride: int


class Split(msgspec.Struct, frozen=True):
    """How the blocks of a worker divide by heads, for engines of another tensor parallelism.

    Attributes:
        heads: the heads of the model and those of this worker; `head_dim` counts bytes of a head in one token.
        order: within a block NHD or HND, as in KvLayout; "" for one head, which is both.
        planes: of keys and values one after the other within a block; 1 where they are side by side or elsewhere.
    """

    heads: KvLayout
    order: str
    planes: int


class WorkerLayout(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of one worker.

    Attributes:
        rank, ranks: of the worker in its engine.
        shape: names and values that must be equal at both engines.
        whole: the same for engines of as many workers, which exchange whole blocks.
        keys: rights to write the regions, in bytes.
        layers: for each layer its pieces; most layouts have one.
        split: how blocks divide by heads; None where that cannot be read off the tensors.
    """

    rank: int
    ranks: int
    shape: dict[str, str]
    whole: dict[str, str]
    keys: list[bytes]
    layers: list[list[Piece]]
    split: Split | None

    def differences(self, other: WorkerLayout) -> str:
        """Return why blocks cannot be exchanged, the names that differ with both values; or nothing."""
        mine, theirs = dict(self.shape), dict(other.shape)
        if self.ranks == other.ranks:
            mine |= self.whole
            theirs |= other.whole
        elif self.split is None or other.split is None:
            return (
                f"tensor_parallel_size {self.ranks} here and {other.ranks} there, and which bytes of a block belong to"
                f" a head cannot be read off its order {self.whole.get('block_order')}"
            )
        elif self.split.order and other.split.order:
            mine["head_order"], theirs["head_order"] = self.split.order, other.split.order
        return ", ".join(
            f"{name} {mine.get(name)} here and {theirs.get(name)} there"
            for name in sorted(mine.keys() | theirs.keys())
            if mine.get(name) != theirs.get(name)
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
    fabric: Fabric, caches: Mapping[str, torch.Tensor], count: int, tokens: int, place: WorkerRank
) -> WorkerBlocks:
    """Register the memory behind the tensors of all layers and return where their blocks are.

    Args:
        fabric: of this worker.
        caches: the tensor of each layer, by its name.
        count: how many blocks each has.
        tokens: tokens of a block.
        place: this worker in its engine.

    Raises:
        ValueError: a tensor without a dimension of `count`, or layers whose blocks differ in size or order.
        DeviceError: the memory cannot be registered.
    """
    regions: dict[tuple[str, int, int], int] = {}
    opened: list[Region] = []
    layers: list[list[Piece]] = []
    orders: set[tuple[int, str, Split | None]] = set()
    for name, tensor in caches.items():
        memory = storage_range(tensor)
        if memory not in regions:
            regions[memory] = len(opened)
            opened.append(fabric.register(storage_bytes(tensor), access="write"))
        begin = tensor.data_ptr() - memory.address
        pieces, page_bytes, order = _pieces(name, tensor, count)
        layers.append([Piece(regions[memory], begin + offset, stride) for offset, stride in pieces])
        orders.add((page_bytes, order, split_of(tensor, count, tokens, len(caches), place)))
    if len(orders) != 1:
        raise ValueError(f"blocks of all layers must have one size and one order, found {sorted(map(str, orders))}")
    page_bytes, order, split = next(iter(orders))
    shape = {
        "block_tokens": str(tokens),
        "layers": str(len(layers)),
        "dtype": str(next(iter(caches.values())).dtype),
        "kv_heads": str(place.kv_heads),
    }
    if split is not None:
        shape |= {"head_bytes": str(split.heads.head_dim), "planes": str(split.planes * len(layers[0]))}
    whole = {"block_bytes": str(page_bytes), "block_order": order, "pieces": str(len(layers[0]))}
    keys = [bytes(region.key("write")) for region in opened]
    names = {name: number for number, name in enumerate(caches)}
    on_gpu = next(iter(caches.values())).device.type != "cpu"
    layout = WorkerLayout(place.rank, place.ranks, shape, whole, keys, layers, split)
    return WorkerBlocks(layout, opened, page_bytes, names, on_gpu)


def split_of(tensor: torch.Tensor, count: int, tokens: int, layers: int, place: WorkerRank) -> Split | None:
    """Return how the blocks of a layer divide by heads, or None where that cannot be read off its tensor.

    vLLM's last dimension is a head in one token, the two before it are tokens and heads, in either order; what comes
    before these are keys and values. Latent attention has no dimension of heads.
    """
    if place.kv_heads % place.ranks and place.ranks % place.kv_heads:
        return None
    heads = KvLayout(
        layers=layers,
        kv_heads=place.kv_heads,
        head_dim=tensor.shape[-1] * tensor.element_size(),
        page_tokens=tokens,
        dtype="uint8",
        tp_rank=place.rank,
        tp_size=place.ranks,
    )
    at = list(tensor.shape).index(count)
    inner = [d for d in range(tensor.dim() - 1) if d != at]
    local = heads.local_heads
    if len(inner) < 2:
        latent = place.kv_heads == 1 and [tensor.shape[d] for d in inner] == [tokens]
        return Split(heads, "", 1) if latent else None
    planes, (one, other) = inner[:-2], inner[-2:]
    sizes = (tensor.shape[one], tensor.shape[other])
    if tensor.stride(-1) != 1 or sizes not in ((tokens, local), (local, tokens)) or (tokens == local and local > 1):
        return None
    token, head = (one, other) if sizes == (tokens, local) else (other, one)
    within = [d for d in planes if tensor.stride(d) < tensor.stride(at)]
    if any(tensor.stride(d) < max(tensor.stride(token), tensor.stride(head)) for d in within if tensor.shape[d] > 1):
        return None
    order = "" if local == 1 else "NHD" if tensor.stride(token) > tensor.stride(head) else "HND"
    return Split(heads, order, prod(tensor.shape[d] for d in within))


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
