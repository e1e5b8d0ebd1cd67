"""Which worker pushes what to which, where the two engines may have different tensor parallelism: pure functions.

Engines of as many workers exchange whole blocks, rank by rank. Others exchange the heads that two workers share; a head
that several workers keep is pushed by one of them, they take turns by layer as in `asyncfabric.kv`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from asyncfabric.integrations.vllm.layout import Piece, WorkerLayout
from asyncfabric.kv import KvLayout, serves, writes_anything


class PageWrite(NamedTuple):
    """The arguments of one `write_pages`; `page_bytes` 0 stands for a whole block."""

    source_region: int
    sources: list[int] | NDArray[np.int64]
    source_stride: int
    source_offset: int
    target_region: int
    targets: list[int] | NDArray[np.int64]
    target_stride: int
    target_offset: int
    page_bytes: int


class _Run(NamedTuple):
    """What two workers share of a plane of a block: `runs` of equal length, and where they are at each end."""

    length_bytes: int
    runs: int
    source_first: int
    source_step: int
    target_first: int
    target_step: int


def may_exchange(kv_heads: int, ranks: int, there: int) -> bool:
    """Return whether an engine of `there` workers and one of `ranks` can exchange the blocks of a model."""
    return there == ranks or (1 <= there <= 1024 and not (kv_heads % there and there % kv_heads))


def sources_of(target: WorkerLayout, there: int) -> list[int]:
    """Return the workers of an engine of `there` that push to a worker."""
    if there == target.ranks or target.split is None:
        return [target.rank % there]
    heads = target.split.heads
    return [rank for rank in range(there) if writes_anything(replace(heads, tp_rank=rank, tp_size=there), heads)]


def targets_of(source: WorkerLayout, there: int) -> list[int]:
    """Return the workers of an engine of `there` that a worker pushes to."""
    if there == source.ranks:
        return [source.rank]
    if source.split is None:
        return list(range(there))  # each is answered why it gets nothing
    heads = source.split.heads
    return [rank for rank in range(there) if writes_anything(heads, replace(heads, tp_rank=rank, tp_size=there))]


def arrivals_of(target: WorkerLayout, there: int, order: str) -> int:
    """Return how many arrivals a worker counts for each block: in all layers, from all workers of an engine of `there`.

    `order` is the engine's Split.order.
    """
    if there == target.ranks or target.split is None:
        return sum(map(len, target.layers))
    heads, planes = target.split.heads, len(target.layers[0]) * target.split.planes
    sources = [replace(heads, tp_rank=rank, tp_size=there) for rank in range(there)]
    return planes * sum(
        _run(source, heads, target.split.order or order).runs
        for layer in range(heads.layers)
        for source in sources
        if serves(source, heads, layer)
    )


def writes_of(
    source: WorkerLayout, target: WorkerLayout, layer: int, sources: list[int], targets: list[int]
) -> Iterator[PageWrite]:
    """Yield what a worker writes to another one of a layer of these blocks, nothing where it pushes nothing.

    Raises:
        ValueError: the layouts do not fit each other.
        IndexError: the other one has no such layer.
    """
    if source.ranks == target.ranks or source.split is None or target.split is None:
        for here, there in zip(source.layers[layer], target.layers[layer], strict=True):
            yield PageWrite(
                here.region, sources, here.stride, here.offset, there.region, targets, there.stride, there.offset, 0
            )
        return
    if not serves(source.split.heads, target.split.heads, layer):
        return
    run = _run(source.split.heads, target.split.heads, source.split.order or target.split.order)
    for here, there in zip(planes_of(source, layer), planes_of(target, layer), strict=True):
        own, source_stride = _strided(sources, here, run.runs, run.source_step)
        theirs, target_stride = _strided(targets, there, run.runs, run.target_step)
        yield PageWrite(
            here.region,
            own,
            source_stride,
            here.offset + run.source_first,
            there.region,
            theirs,
            target_stride,
            there.offset + run.target_first,
            run.length_bytes,
        )


def planes_of(layout: WorkerLayout, layer: int) -> list[Piece]:
    """Return the planes of a layer's blocks: of keys, of values, or of both side by side."""
    assert layout.split is not None
    heads = layout.split.heads
    step = heads.local_heads * heads.page_tokens * heads.head_dim
    return [
        Piece(piece.region, piece.offset + plane * step, piece.stride)
        for piece in layout.layers[layer]
        for plane in range(layout.split.planes)
    ]


def _strided(blocks: list[int], piece: Piece, count: int, step: int) -> tuple[NDArray[np.int64], int]:
    """Return where `count` runs of each block are, `step` bytes apart: multiples of a stride, and the stride.

    Raises:
        ValueError: blocks do not begin at multiples of the step.
    """
    numbers = np.asarray(blocks, np.int64)
    if count == 1:
        return numbers, piece.stride
    if piece.stride % step:
        raise ValueError(f"blocks are {piece.stride} bytes apart, no multiple of the {step} bytes of a token")
    return (numbers[:, None] * (piece.stride // step) + np.arange(count)).reshape(-1), step


def _run(source: KvLayout, target: KvLayout, order: str) -> _Run:
    first = max(source.first_head, target.first_head)
    shared = max(0, min(source.heads.stop, target.heads.stop) - first)
    before = (first - source.first_head, first - target.first_head)
    head, plane = source.head_dim, source.page_tokens * source.head_dim
    if order == "NHD" and not source.local_heads == target.local_heads == shared:
        steps = (source.local_heads * head, target.local_heads * head)
        return _Run(shared * head, source.page_tokens, before[0] * head, steps[0], before[1] * head, steps[1])
    return _Run(shared * plane, 1, before[0] * plane, 0, before[1] * plane, 0)
