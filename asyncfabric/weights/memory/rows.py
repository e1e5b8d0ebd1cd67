"""Rows: how rows of a plan lie in shards and in a receiver's memory, as strided runs; putting them in order.

Pure, but for the compiled pass that orders and hashes. Senders and receivers lay out a receiver's tensors by the same
arithmetic, in one region, and count writes by the same rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncfabric._kernels.native import native_ordering
from asyncfabric._kernels.ordering import LEAST_SUMMED_BYTES, Ordering
from asyncfabric.weights.plan.boxes import Ints
from asyncfabric.weights.plan.formats import SCALE_BYTES, STORED_AS
from asyncfabric.weights.plan.geometry import Pieces
from asyncfabric.weights.plan.parts import MoveKind
from asyncfabric.weights.plan.plan import Plan

Bytes = NDArray[np.uint8]

VIEWED_RUN_BYTES = 16 << 10
"""Runs from here on are looked at where they lie; a call is nothing beside them."""


class Strided:
    """A box of elements somewhere in memory: sizes and byte strides, outermost first as they lie at the receiver.

    Attributes:
        sizes, strides: tuples; dimensions of length 1 are left out.
        item: bytes of an element.
        nbytes: of the elements.
        run_bytes: of the longest contiguous runs that the box consists of.
    """

    __slots__ = ("item", "nbytes", "run_bytes", "sizes", "strides")

    def __init__(self, sizes: tuple[int, ...], strides: tuple[int, ...], item: int) -> None:
        self.sizes: tuple[int, ...] = sizes
        self.strides: tuple[int, ...] = strides
        self.item: int = item
        self.nbytes: int = prod(sizes) * item
        self.run_bytes: int = item
        for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
            if stride != self.run_bytes:
                break
            self.run_bytes *= size

    def offsets(self, run_bytes: int) -> Ints:
        """Return where each run of this length begins, in order, from the first element.

        `run_bytes` is `self.run_bytes`, or the bytes of some of the innermost dimensions of such a run.
        """
        offsets = np.zeros(1, np.int64)
        inner = self.nbytes
        for size, stride in zip(self.sizes, self.strides, strict=True):
            if inner <= run_bytes:
                break
            inner //= size
            offsets = (offsets[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
        return offsets

    def gathered(self, memory: Bytes, offset: int) -> Bytes:
        """Return the bytes in order; a view when they lie in one run, else a copy."""
        parts = list(self.parts(memory, offset))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def scatter(self, memory: Bytes, offset: int, ordered: Bytes) -> None:
        """Put bytes that are in order where the box lies; the inverse of `gathered`."""
        run = self.run_bytes
        if run == self.nbytes:
            memory[offset : offset + run] = ordered
            return
        keep = self.outer_dimensions(run)
        form = np.dtype((np.void, run))
        np.ndarray(self.sizes[:keep], form, memory, offset, self.strides[:keep])[...] = ordered.view(form).reshape(
            self.sizes[:keep]
        )

    def parts(self, memory: Bytes, offset: int, most_bytes: int = 1 << 18) -> Iterator[Bytes]:
        """Yield the bytes in order: views of long runs, copies of about `most_bytes` of short ones.

        Small copies stay in the cache and are no memory to speak of.
        """
        run, nbytes = self.run_bytes, self.nbytes
        if run == nbytes:
            yield memory[offset : offset + nbytes]
            return
        if run >= VIEWED_RUN_BYTES:
            for begin in self.offsets(run).tolist():
                yield memory[offset + begin : offset + begin + run]
            return
        keep = self.outer_dimensions(run)
        sizes, strides = self.sizes[:keep], self.strides[:keep]
        view = np.ndarray(sizes, np.dtype((np.void, run)), memory, offset, strides)
        each = nbytes // sizes[0]  # of one step along the outermost dimension
        step = max(1, most_bytes // each)
        for low in range(0, sizes[0], step):
            yield np.ascontiguousarray(view[low : low + step]).reshape(-1).view(np.uint8)

    def outer_dimensions(self, run_bytes: int) -> int:
        """Return how many outer dimensions have steps from run to run."""
        keep, inner = len(self.sizes), self.item
        while inner < run_bytes:
            keep -= 1
            inner *= self.sizes[keep]
        return keep


def order_of(stride: Ints, size: Ints) -> list[int]:
    """Return the dimensions of a piece as they lie at the receiver, outermost first; those of length 1 left out."""
    return [int(dim) for dim in np.argsort(-stride, kind="stable") if size[dim] > 1]


class PieceShape:
    """One piece at its receiver: weights, and scales if it writes any.

    Attributes:
        weights: how the elements lie there.
        weights_at, scales_at: where they begin in their tensors.
        run_bytes, runs: of the weights.
        scales: how its scales lie, None without.
        scale_run_bytes, scale_runs: of the scales; 0 without.
        order: the dimensions of the source, outermost first as they lie at the receiver.
        scale_order: the same of the scales.
    """

    def __init__(self, pieces: Pieces, piece: int, to: str) -> None:
        size, stride = pieces.size[piece], pieces.stride[piece]
        self.order: list[int] = order_of(stride, size)
        self.weights: Strided = _strided(size, stride, self.order, STORED_AS[to].itemsize)
        self.weights_at: int = int(pieces.offset[piece])
        self.run_bytes: int = int(pieces.run_bytes[piece])
        self.runs: int = int(pieces.runs[piece])
        self.scales: Strided | None = None
        self.scales_at: int = 0
        self.scale_run_bytes: int = 0
        self.scale_runs: int = int(pieces.scale_runs[piece])
        self.scale_order: list[int] = []
        if self.scale_runs:
            extent = np.concatenate([size[:-2], pieces.scale_size[piece]])
            stride = pieces.scale_stride[piece]
            self.scale_order = order_of(stride, extent)
            self.scales = _strided(extent, stride, self.scale_order, SCALE_BYTES)
            self.scales_at = int(pieces.scale_offset[piece])
            self.scale_run_bytes = self.scales.nbytes // self.scale_runs

    @property
    def nbytes(self) -> int:
        """Bytes of weights and scales."""
        return self.weights.nbytes + (self.scales.nbytes if self.scales is not None else 0)


def _strided(size: Ints, stride: Ints, order: list[int], item: int) -> Strided:
    return Strided(tuple(int(size[dim]) for dim in order), tuple(int(stride[dim]) for dim in order), item)


DIRECT_RUN_BYTES = 32 << 10
"""Shorter runs are put in order before they are written: they are read once, and hashed and written from the cache."""


def written_run_bytes(source: Strided | None, target_run_bytes: int) -> int:
    """Return the bytes of one write of a piece: sender and receiver count by this rule.

    What lies in memory as it is written goes in runs that are contiguous at both ends. `source` is None for what is
    converted; that, and what would go in too short runs, is put in order first and goes in the receiver's runs.
    """
    if source is None or source.run_bytes >= target_run_bytes or source.run_bytes < DIRECT_RUN_BYTES:
        return target_run_bytes
    return source.run_bytes


def is_direct(source: Strided | None, run_bytes: int) -> bool:
    """Return whether a piece is written from where it lies, in runs of this length."""
    return source is not None and source.run_bytes >= run_bytes


def in_shard(plan: Plan, kind: MoveKind, rank: int, piece: int, order: list[int]) -> Strided | None:
    """Return how a piece lies in the shard of a trainer, in the receiver's order; None when it is converted."""
    if kind.block or kind.dtype != kind.to:
        return None
    placement = plan.sources[kind.source]
    own = placement.sizes[placement.row_of(rank)].tolist()
    size, item = plan.pieces.size[piece], STORED_AS[kind.dtype].itemsize
    shape = [1] * (len(size) - len(own)) + own
    strides = [item * prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return Strided(tuple(int(size[dim]) for dim in order), tuple(strides[dim] for dim in order), item)


ALIGN_BYTES = 256
"""Where tensors begin: what kernels like to load."""


class TensorLayout:
    """The tensors of one receiver: one after the other, as everybody lays them out who writes to it; or where they lie.

    Attributes:
        offsets: by tensor, where it begins.
        lengths: by tensor, its bytes.
        total_bytes: of all, with the gaps between them; at least 1.
        by_region: int64 (regions of the plan,): where each begins, -1 for those that this receiver has not.
    """

    def __init__(self, plan: Plan, receiver: int, placed: Mapping[str, int] | None = None) -> None:
        """Lay out what `plan.region_bytes(receiver)` lists, in its order; or take where each lies, by name."""
        self.lengths: Mapping[str, int] = plan.region_bytes(receiver)
        self.offsets: dict[str, int] = {}
        at = 0
        for name, length in self.lengths.items():
            self.offsets[name] = at if placed is None else placed[name]
            at = max(at, self.offsets[name] + -(-length // ALIGN_BYTES) * ALIGN_BYTES)
        self.total_bytes: int = max(at, 1)
        numbers = {name: number for number, name in enumerate(plan.regions)}
        self.by_region: Ints = np.full(len(plan.regions), -1, np.int64)
        for name, offset in self.offsets.items():
            self.by_region[numbers[name]] = offset

    def views(self, memory: Any) -> dict[str, Any]:
        """Return the bytes of each tensor in memory of `total_bytes`: slices of the array or tensor of bytes."""
        return {name: memory[at : at + self.lengths[name]] for name, at in self.offsets.items()}

    def named(self, offset: int) -> str:
        """Return the tensor that a byte of the memory belongs to, for messages."""
        return next(
            (name for name, at in self.offsets.items() if at <= offset < at + max(1, self.lengths[name])), "a gap"
        )


@lru_cache(maxsize=4096)
def layout_of(plan: Plan, receiver: int) -> TensorLayout:
    """Return the layout of a receiver; plans are values that do not change, so it is worked out once."""
    return TensorLayout(plan, receiver)


LEAST_RUN_BYTES = 256
"""Shorter runs cost a call each: numpy exchanges dimensions quicker."""

MOST_DIMENSIONS = 8
"""From run to run."""

_ordering = cache(native_ordering)


def orders(lies: Strided) -> bool:
    """Return whether a box can be put in order so."""
    keep = lies.outer_dimensions(lies.run_bytes)
    return lies.run_bytes >= LEAST_RUN_BYTES and lies.nbytes >= LEAST_SUMMED_BYTES and keep <= MOST_DIMENSIONS


def order_and_sum(lies: Strided, memory: Bytes, at: int, out: Bytes, past: bool) -> int | None:
    """Put a box that `orders` accepts in order, into contiguous memory; return the XXH3 of it.

    With `past` it is written past the caches, for memory that is read much later. None: nothing was compiled, and
    nothing was done.

    Raises IndexError when the box leaves its memory or does not fit.
    """
    loops: Ordering | None = _ordering()
    if loops is None:
        return None
    keep = lies.outer_dimensions(lies.run_bytes)
    return loops.order_and_sum(
        memory, at, _ints(lies.sizes[:keep]), _ints(lies.strides[:keep]), lies.run_bytes, out, past
    )


def _ints(values: tuple[int, ...]) -> Ints:
    return np.array(values, np.int64)


PLACE_ALIGN = 64


def padded(length_bytes: int) -> int:
    """Return the bytes that something takes in the staging memory."""
    return -(-length_bytes // PLACE_ALIGN) * PLACE_ALIGN
