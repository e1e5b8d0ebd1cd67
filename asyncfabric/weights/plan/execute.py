"""Carries a plan out in numpy, in one process: the reference for whoever carries it out over a network.

Slow and plain on purpose. The conversions (`convert`, `HeldShard`) are those that a pipeline may call; what it must
not do differently is the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncfabric.weights.plan.batch import Batch, forwarded_by, sent_by
from asyncfabric.weights.plan.boxes import Ints
from asyncfabric.weights.plan.formats import BLOCK, STORED_AS, block_maxima, cast, quantise, scales_of, to_float32
from asyncfabric.weights.plan.parts import MoveKind
from asyncfabric.weights.plan.placement import shares
from asyncfabric.weights.plan.plan import Plan

Elements = NDArray[Any]

Bytes = NDArray[np.uint8]

TensorKey = tuple[str, int, str]

Shards = Callable[[int, str], Elements]
"""(trainer's rank, parameter) -> its shard, stored as `formats.STORED_AS` states."""


class ReplicaMemory:
    """The tensors of all replicas of a plan as bytes, and how often each byte was written.

    Attributes:
        tensors, counts: by (replica, receiver, tensor): uint8 arrays of the tensor's bytes.
        writes: by (replica, receiver, sender as in Replica.senders): contiguous runs written.
    """

    def __init__(self, plan: Plan, poison: int = 0xA5) -> None:
        """Allocate, filled with `poison`."""
        keys = [
            (one.name, receiver, name, length)
            for one in plan.replicas
            for receiver in range(plan.receivers)
            for name, length in plan.region_bytes(receiver).items()
        ]
        self.tensors: dict[TensorKey, Bytes] = {key[:3]: np.full(key[3], poison, np.uint8) for key in keys}
        self.counts: dict[TensorKey, Bytes] = {key[:3]: np.zeros(key[3], np.uint8) for key in keys}
        self.writes: dict[tuple[str, int, int], int] = {}

    def write(self, replica: str, receiver: int, region: str, sender: int, offsets: Ints, runs: Elements) -> None:
        """Write rows of `runs` (uint8, (runs, run bytes)) at byte offsets of a tensor."""
        tensor, counts = self.tensors[replica, receiver, region], self.counts[replica, receiver, region]
        for offset, run in zip(offsets.tolist(), runs, strict=True):
            if offset < 0 or offset + len(run) > len(tensor):
                raise IndexError(f"{region} of {replica}/{receiver}: {offset}+{len(run)} leaves {len(tensor)} bytes")
            tensor[offset : offset + len(run)] = run
            counts[offset : offset + len(run)] += 1
        key = (replica, receiver, sender)
        self.writes[key] = self.writes.get(key, 0) + len(runs)


class HeldShard:
    """One trainer's part of one parameter, with the scales of its blocks once all maxima are known.

    Args:
        elements: the shard, with as many dimensions as `start`.
        start: where it begins in the parameter.
        kind: its conversion.
    """

    def __init__(self, elements: Elements, start: Ints, kind: MoveKind) -> None:
        self.elements: Elements = elements
        self.start: Ints = start
        self.kind: MoveKind = kind
        self.maxima: NDArray[np.float32] = (
            self.maxima_of(start, np.array(elements.shape)) if kind.block else np.zeros(0, np.float32)
        )

    def maxima_of(self, start: Ints, size: Ints) -> NDArray[np.float32]:
        """Return the maxima of the parts of blocks in a box of the parameter that lies in this shard."""
        box = self.elements[_slices(start - self.start, size)]
        return block_maxima(to_float32(box, self.kind.dtype), (int(start[-2]), int(start[-1])))

    def learn(self, start: Ints, maxima: NDArray[np.float32]) -> None:
        """Take the maxima of a box of the parameter that another rank holds."""
        first = np.concatenate([start[:-2] - self.start[:-2], start[-2:] // BLOCK - self.start[-2:] // BLOCK])
        view = self.maxima[_slices(first, np.array(maxima.shape))]
        np.maximum(view, maxima, out=view)

    def convert(self, start: Ints, size: Ints) -> Elements:
        """Return a box of the parameter, cast or quantised; the box is one of this shard."""
        box = self.elements[_slices(start - self.start, size)]
        if not self.kind.block:
            return cast(box, self.kind.dtype, self.kind.to)
        first = start[-2:] // BLOCK
        scales = self.scales(start[:-2], size[:-2], first, -(-(start + size)[-2:] // BLOCK) - first)
        return quantise(to_float32(box, self.kind.dtype), scales, (int(start[-2]), int(start[-1])))

    def scales(self, lead_start: Ints, lead_size: Ints, first: Ints, count: Ints) -> NDArray[np.float32]:
        """Return scales of `count` blocks of rows and columns from `first` on, for these leading indices."""
        begin = np.concatenate([lead_start - self.start[:-2], first - self.start[-2:] // BLOCK])
        return scales_of(self.maxima[_slices(begin, np.concatenate([lead_size, count]))])


def run_layout(elements: Elements, stride: Ints, run_bytes: int) -> tuple[Ints, Elements]:
    """Return (byte offset of each run from the first element's, runs as uint8 rows) for a box with these byte strides.

    Transposing happens here: elements are put into the order in which they lie at the receiver.
    """
    order = np.argsort(-stride, kind="stable")
    ordered = np.ascontiguousarray(elements.transpose(order))
    offsets = np.zeros(ordered.shape, np.int64)
    for dim, axis in enumerate(order):
        steps = np.arange(ordered.shape[dim], dtype=np.int64) * stride[axis]
        offsets += steps.reshape([-1 if each == dim else 1 for each in range(ordered.ndim)])
    runs = ordered.reshape(-1).view(np.uint8).reshape(-1, run_bytes)
    per_run = run_bytes // elements.dtype.itemsize
    return offsets.reshape(-1)[::per_run], runs


def execute(plan: Plan, shards: Shards, memory: ReplicaMemory) -> None:
    """Carry the plan out: every trainer, then what receivers forward, each replica after the one that feeds it."""
    for rank in range(plan.trainers):
        send(plan, sent_by(plan, rank), shards, memory)
    for one in plan.replicas:  # in the order of seats: feeders come first
        for outer in (False, True):  # what a replica feeds to another one may have come to it inside its node
            for receiver in range(plan.receivers):
                _forward(plan, one.name, receiver, memory, outer)


def send(plan: Plan, batch: Batch, shards: Shards, memory: ReplicaMemory) -> None:
    """Convert and write what one trainer sends."""
    held: dict[tuple[int, int], HeldShard] = {}
    for row in range(len(batch)):
        key = (int(batch.parameter[row]), int(batch.kind[row]))
        if key not in held:
            held[key] = open_shard(plan, plan.parameters[key[0]], key[1], batch.rank, shards)
        shard, piece = held[key], int(batch.piece[row])
        start, size = plan.pieces.start[piece], plan.pieces.size[piece]
        replica, receiver = plan.replicas[int(batch.replica[row])].name, int(batch.receiver[row])
        elements = shard.convert(start, size)
        offsets, runs = run_layout(elements, plan.pieces.stride[piece], int(plan.pieces.run_bytes[piece]))
        region = plan.regions[int(batch.region[row])]
        memory.write(replica, receiver, region, batch.rank, offsets + plan.pieces.offset[piece], runs)
        if batch.scales[row] < 0 or not plan.pieces.scale_runs[piece]:
            continue
        count = plan.pieces.scale_size[piece]
        scales = shard.scales(start[:-2], size[:-2], plan.pieces.scale_start[piece], count)
        run_bytes = scales.nbytes // int(plan.pieces.scale_runs[piece])
        offsets, runs = run_layout(scales, plan.pieces.scale_stride[piece], run_bytes)
        region = plan.regions[int(batch.scales[row])]
        memory.write(replica, receiver, region, batch.rank, offsets + plan.pieces.scale_offset[piece], runs)


def open_shard(plan: Plan, parameter: str, kind: int, rank: int, shards: Shards) -> HeldShard:
    """Return a trainer's shard with the maxima of cut blocks learned from its neighbours."""
    what = plan.kinds[kind]
    placement = plan.sources[what.source]
    dims = plan.pieces.start.shape[1]

    def held(holder: int) -> HeldShard:
        row = placement.row_of(holder)
        start = np.concatenate([np.zeros(dims - len(placement.shape), np.int64), placement.starts[row]])
        shape = (1,) * (dims - len(placement.shape)) + tuple(placement.sizes[row].tolist())
        elements = shards(holder, parameter)
        if elements.dtype != STORED_AS[what.dtype] or elements.size != int(np.prod(shape)):
            raise ValueError(
                f"{parameter} of rank {holder}: expected {shape} of {STORED_AS[what.dtype]} ({what.dtype}), got "
                f"{elements.shape} of {elements.dtype}"
            )
        return HeldShard(elements.reshape(shape), start, what)

    shard = held(rank)
    if what.block:
        reported = shares(placement)
        for row in np.flatnonzero(reported.to == rank):
            pad = dims - len(placement.shape)
            start = np.concatenate([np.zeros(pad, np.int64), reported.starts[row]])
            size = np.concatenate([np.ones(pad, np.int64), reported.sizes[row]])
            shard.learn(start, held(int(reported.source[row])).maxima_of(start, size))
    return shard


def _forward(plan: Plan, name: str, receiver: int, memory: ReplicaMemory, outer: bool) -> None:
    reported, pieces = forwarded_by(plan, name, receiver), plan.pieces
    for row in range(len(reported.region)):
        to = plan.replicas[int(reported.replica[row])].name
        if (to != name) != outer:
            continue
        sender = plan.trainers + receiver + (plan.receivers if outer else 0)
        mine, theirs = int(reported.from_piece[row]), int(reported.to_piece[row])
        size = pieces.size[mine]
        item = STORED_AS[plan.kinds[plan.kind_of(mine)].to]
        for region, start, stride, to_start, to_stride, run_bytes, shape, dtype in (
            (
                reported.region[row],
                pieces.offset[mine],
                pieces.stride[mine],
                pieces.offset[theirs],
                pieces.stride[theirs],
                int(pieces.run_bytes[theirs]),
                tuple(size.tolist()),
                item,
            ),
            (
                reported.scales[row],
                pieces.scale_offset[mine],
                pieces.scale_stride[mine],
                pieces.scale_offset[theirs],
                pieces.scale_stride[theirs],
                0,
                (*size[:-2].tolist(), *pieces.scale_size[mine].tolist()),
                np.dtype("<f4"),
            ),
        ):
            if region < 0 or 0 in shape:
                continue
            tensor = memory.tensors[name, receiver, plan.regions[int(region)]]
            view = np.ndarray(shape, dtype, tensor, int(start), tuple(stride.tolist()))
            length = run_bytes or view.nbytes // int(pieces.scale_runs[theirs])
            offsets, runs = run_layout(view, to_stride, length)
            memory.write(to, int(reported.receiver[row]), plan.regions[int(region)], sender, offsets + to_start, runs)


def _slices(start: Ints, size: Ints) -> tuple[slice, ...]:
    return tuple(slice(int(begin), int(begin + length)) for begin, length in zip(start, size, strict=True))
