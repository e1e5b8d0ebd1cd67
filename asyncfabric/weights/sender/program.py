"""Program: what one trainer sends, worked out once for a plan: boxes with their rows, in units that pipelines carry.

Pure but for looking at where shards lie. A box is brought, converted and hashed once and written to all its receivers.
A box that needs no conversion, and whose runs at the receivers are contiguous in the shard, is written from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import Any

import numpy as np

from asyncfabric import Region
from asyncfabric.weights.channel import receiver_name
from asyncfabric.weights.memory.rows import (
    PieceShape,
    Strided,
    in_shard,
    is_direct,
    layout_of,
    orders,
    padded,
    written_run_bytes,
)
from asyncfabric.weights.plan.batch import Batch, sent_by
from asyncfabric.weights.plan.formats import BLOCK, SCALE_BYTES, STORED_AS
from asyncfabric.weights.plan.parts import MoveKind
from asyncfabric.weights.plan.plan import Plan
from asyncfabric.weights.sender.shards import Gathered, Shards, gathered, is_gathered


@dataclass(frozen=True, slots=True)
class SentRow:
    """A box on its way to one receiver.

    Attributes:
        row: number in the plan.
        receiver: its name.
        shape: how it lies there.
        run_bytes: of one write of weights.
        weights_at, scales_at: where it begins in the receiver's memory.
    """

    row: int
    receiver: str
    shape: PieceShape
    run_bytes: int
    weights_at: int
    scales_at: int


@dataclass(slots=True)
class ShardBox:
    """A box of a parameter and the rows that it is written as.

    Attributes:
        parameter, kind_number, kind: what and how.
        start: in the parameter; origin: where the shard begins in it; size: in elements.
        shard_shape: of the shard; direct: how the box lies in it, when it is written from there.
        gathered: the rail puts it in order while it writes it from there.
        rows: at least one.
        local_start: where it begins in the shard.
        sizes, axes: of the elements as they lie at the receivers, and which of those each dimension of the box is.
        weight_bytes, scale_bytes: of the weights as they are written, and of the scales that this box writes.
        scales_staged_at: where the scales begin in its place in the staging memory: behind the weights, if they are
            there.
        lies: how it lies in the shard, when that is in memory and only has to be put in order.
        how: the device lays it, many at once and without maxima; None when one by one, with maxima.
        staged_bytes: what it takes of the staging memory: weights unless they are written from the shard, then scales.
    """

    parameter: str
    parameter_number: int
    kind_number: int
    kind: MoveKind
    start: np.ndarray
    origin: np.ndarray
    size: tuple[int, ...]
    shard_shape: tuple[int, ...]
    direct: Strided | None
    gathered: bool
    rows: list[SentRow]
    local_start: tuple[int, ...] = field(init=False)
    sizes: list[int] = field(init=False)
    axes: list[int] = field(init=False)
    weight_bytes: int = field(init=False)
    scale_bytes: int = field(init=False)
    scales_staged_at: int = field(init=False)
    staged_bytes: int = field(init=False)
    lies: Strided | None = field(init=False, default=None)
    how: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Work out what every version asks for."""
        shape = self.rows[0].shape
        self.local_start = tuple((self.start - self.origin).tolist())
        whole = [dim for dim in range(len(self.size)) if dim not in shape.order] + shape.order  # of length 1: anywhere
        self.sizes = [self.size[dim] for dim in whole]
        self.axes = np.argsort(whole).tolist()
        self.weight_bytes = prod(self.size) * STORED_AS[self.kind.to].itemsize
        self.scale_bytes = 0 if shape.scales is None else shape.scales.nbytes
        self.scales_staged_at = 0 if self.direct is not None else padded(self.weight_bytes)
        self.staged_bytes = self.scales_staged_at + padded(self.scale_bytes)

    @property
    def written_bytes(self) -> int:
        """What one receiver gets of it."""
        return self.weight_bytes + self.scale_bytes

    @property
    def measured(self) -> bool:
        """Whether it is converted with maxima that the exchange finds."""
        return self.kind.block > 0 and self.how is None

    def describe(self, shards: Shards, shape: Sequence[int]) -> None:
        """Describe it to the device, if it is converted and no quantisation block is cut; `shape`: of the parameter."""
        if self.direct is not None or shards.place(self.parameter) is None:
            return
        axes: list[int] = []
        if self.kind.block:
            ends = self.start + np.array(self.size)
            cut = (self.start[-2:] % BLOCK != 0) | ((ends % BLOCK != 0)[-2:] & (ends[-2:] != np.array(shape[-2:])))
            blocks = [*self.size[:-2], *(-(-side // BLOCK) for side in self.size[-2:])]
            if cut.any() or self.scale_bytes != prod(blocks) * SCALE_BYTES:
                return
            order = self.rows[0].shape.scale_order
            axes = [dim for dim in range(len(blocks)) if dim not in order] + order
        box = shards.box(self.parameter, self.local_start, self.size)
        self.how = shards.device.described(box, self.kind, self.sizes, self.axes, axes)

    def source(self, shards: Shards) -> tuple[Region, int]:
        """Return where it begins, when it is written from the shard: the region, and a byte of it."""
        place = shards.place(self.parameter)
        assert place is not None
        at, step = place[1], STORED_AS[self.kind.dtype].itemsize
        for begin, length in zip(reversed(self.local_start), reversed(self.shard_shape), strict=True):
            at, step = at + begin * step, step * length
        return place[0], at


class Unit:
    """Boxes that go through the pipeline together."""

    __slots__ = ("_gathered", "boxes", "ready", "staged_bytes")

    def __init__(self, boxes: list[ShardBox]) -> None:
        self.boxes: list[ShardBox] = boxes
        self.staged_bytes: int = sum(box.staged_bytes for box in boxes)
        self.ready: dict[Any, Any] = {}  # what a filler made of it once, by where it is staged
        self._gathered: list[Gathered] | None = None

    def gathered(self, shards: Shards) -> list[Gathered]:
        """Return what the rail gathers of it."""
        if self._gathered is None:
            self._gathered = gathered(self.boxes, shards)
        return self._gathered


class Program:
    """Everything that a trainer sends of one plan.

    Attributes:
        boxes: in order.
        receivers: names of those who get something.
        bytes_to, sent_bytes: to each of them, and to all.
        largest_staged: the most that one box stages.
        largest_box: the most bytes that a box has, stored or written, that the device does not lay at once.
    """

    def __init__(self, plan: Plan, rank: int, shards: Shards, gathers: bool = False) -> None:
        """Work it out for a plan with its replicas; `gathers`: the rail does."""
        batch = sent_by(plan, rank)
        self.boxes: list[ShardBox] = list(_boxes(plan, batch, shards, gathers))
        self.receivers: tuple[str, ...] = tuple(sorted({row.receiver for box in self.boxes for row in box.rows}))
        self.bytes_to: dict[str, int] = dict.fromkeys(self.receivers, 0)
        for box in self.boxes:
            for row in box.rows:
                self.bytes_to[row.receiver] += row.shape.nbytes
        self.sent_bytes: int = sum(self.bytes_to.values())
        self.largest_staged: int = max((box.staged_bytes for box in self.boxes), default=0)
        self.largest_box: int = max(
            (
                prod(box.size) * max(STORED_AS[box.kind.dtype].itemsize, STORED_AS[box.kind.to].itemsize)
                for box in self.boxes
                if box.how is None
            ),
            default=0,
        )
        self._units: dict[tuple[int, int | None, int | None], list[Unit]] = {}

    def units(self, most_bytes: int, first_bytes: int | None = None, last_bytes: int | None = None) -> list[Unit]:
        """Return the boxes in units that stage and write at most about `most_bytes`; a single box may have more.

        With `first_bytes` the first ones are small, and each may have twice of the one before. With `last_bytes` the
        last ones are: each has at most half of what is left, down to that. They are the same units each time.
        """
        key = most_bytes, first_bytes, last_bytes
        units = self._units.get(key)
        if units is None:
            units = self._units[key] = list(self._united(*key))
        return units

    def _united(self, whole: int, first_bytes: int | None, last_bytes: int | None) -> Iterator[Unit]:
        left = sum(box.written_bytes for box in self.boxes)

        def at_most(grown: int) -> int:
            return min(grown, whole) if last_bytes is None else min(grown, whole, max(left // 2, last_bytes))

        grown = whole if first_bytes is None else first_bytes
        most_bytes = at_most(grown)
        boxes: list[ShardBox] = []
        staged = written = 0
        for box in self.boxes:
            if boxes and (staged + box.staged_bytes > most_bytes or written + box.written_bytes > most_bytes):
                yield Unit(boxes)
                left -= written
                boxes, staged, written = [], 0, 0
                grown = min(2 * grown, whole)
                most_bytes = at_most(grown)
            boxes.append(box)
            staged += box.staged_bytes
            written += box.written_bytes
        if boxes:
            yield Unit(boxes)


def _boxes(plan: Plan, batch: Batch, shards: Shards, gathers: bool) -> Iterator[ShardBox]:
    shapes: dict[int, PieceShape] = {}
    names = {
        (number, receiver): receiver_name(one.name, receiver)
        for number, one in enumerate(plan.replicas)
        for receiver in range(plan.receivers)
    }
    pieces = plan.pieces
    columns = (
        batch.box,
        batch.replica,
        batch.receiver,
        batch.kind,
        batch.parameter,
        batch.region,
        batch.scales,
        batch.piece,
        batch.row,
    )
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for _, together in groupby(enumerate(rows), lambda entry: entry[1][0]):
        sent: list[SentRow] = []
        direct = True
        for index, (_, replica, receiver, kind, parameter, region, scales, piece, row) in together:
            shape = shapes.get(piece)
            if shape is None:
                shape = shapes[piece] = PieceShape(pieces, piece, plan.kinds[kind].to)
            if not sent:
                first = index, kind, parameter, piece
                lies = in_shard(plan, plan.kinds[kind], batch.rank, piece, shape.order)
            run_bytes = written_run_bytes(lies, shape.run_bytes)
            direct = direct and is_direct(lies, run_bytes)
            layout = layout_of(plan, receiver).by_region
            scales_at = int(layout[scales]) + shape.scales_at if scales >= 0 and shape.scales is not None else 0
            weights_at = int(layout[region]) + shape.weights_at
            sent.append(SentRow(row, names[replica, receiver], shape, run_bytes, weights_at, scales_at))
        index, kind, parameter, piece = first
        name = plan.parameters[parameter]
        if shards.place(name) is None:
            lies = None
        gather = gathers and lies is not None and all(is_gathered(lies, one.run_bytes) for one in sent)
        box = ShardBox(
            name,
            parameter,
            kind,
            plan.kinds[kind],
            pieces.start[piece],
            pieces.start[piece] - batch.local_start[index],
            tuple(pieces.size[piece].tolist()),
            shards.shapes[name],
            lies if direct or gather else None,
            gather,
            sent,
        )
        if lies is not None and box.direct is None and orders(lies):
            box.lies = lies
        box.describe(shards, plan.sources[box.kind.source].shape)
        yield box
