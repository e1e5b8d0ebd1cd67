"""Filling: a unit's boxes converted into the staging memory, hashed, and given as runs to write.

In host memory `fill` is for a worker thread and lets go of the GIL. On a GPU it only begins the work of the device, so
the event loop's thread does that, but for shards that are brought.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from asyncfabric import Region
from asyncfabric.weights.memory.checksums import ChecksumKind
from asyncfabric.weights.memory.device import Device, Memory, PlacedBox, Stretch, Summing, Sums, stretch
from asyncfabric.weights.memory.host import HostSums
from asyncfabric.weights.plan.boxes import Ints
from asyncfabric.weights.plan.formats import BLOCK, scales_of
from asyncfabric.weights.sender.exchange import Floats
from asyncfabric.weights.sender.program import ShardBox, Unit
from asyncfabric.weights.sender.scratch import ScratchStaging
from asyncfabric.weights.sender.shards import Gathered, Shards

PAST_CACHES_BYTES = 48 << 20
"""Staging memory from here on is out of the caches before the engine reads it."""


class FilledRun(NamedTuple):
    """Runs of equal length, from one region to one receiver: where they begin there, and where they go."""

    region: Region
    receiver: str
    run_bytes: int
    sources: Ints
    targets: Ints


class Filled(NamedTuple):
    """A unit that is as it is written, or will be once its device has done what was begun.

    Attributes:
        sums: the checksum of each box, in time.
        after: what writes of it wait for.
        marks: moments between converting and hashing, in turns.
    """

    sums: Sums
    after: object
    marks: list[Any]


class _FilledUnit(NamedTuple):
    """What is the same each time that a unit is staged in one place, on a device that queues.

    Attributes:
        lay: converts all boxes.
        sum: works out their checksums.
        runs: what is written.
    """

    lay: Callable[[], None]
    sum: Summing
    runs: list[FilledRun]


class UnitFiller:
    """Fills the staging memory of one trainer for one version.

    Attributes:
        device: of the shards and of the staging memory.
        memory: the staging memory, None when nothing is staged.
    """

    def __init__(self, shards: Shards, staging: ScratchStaging | None, kind: ChecksumKind) -> None:
        """Read shards; `staging` is None when nothing is converted."""
        self.device: Device = shards.device
        self.memory: Memory | None = None if staging is None else self.device.memory_of(staging.region)
        self._kind: ChecksumKind = kind
        self._shards = shards
        self._staging = staging

    def quick(self, unit: Unit) -> bool:
        """Return whether filling it is but a few calls of the device, which need no thread."""
        return self.device.queues and all(self._shards.place(box.parameter) is not None for box in unit.boxes)

    def idle(self, unit: Unit) -> bool:
        """Return whether there is nothing to fill and to hash: the rail does both."""
        return self._kind == "xxh3" and all(box.gathered for box in unit.boxes)

    def fill(self, unit: Unit, at: int, maxima: list[tuple[Floats, Ints] | None]) -> Filled:
        """Convert and stage a unit at `at`, and hash it."""
        if (ready := self._ready(unit, at)) is not None:
            return self._begin(unit, ready)
        device, sums = self.device, self.device.sums(self._kind)
        with device.working():
            marks = [device.mark()]
            filled = []
            reported: list[PlacedBox] = []
            for box, found in zip(unit.boxes, maxima, strict=True):
                begin, at = at, at + box.staged_bytes
                if self._left(box, sums) or self._ordered(box, begin, sums):
                    marks += [device.mark()] * 2
                    continue
                parts = self._parts(box, begin, found, reported)
                if device.queues:
                    filled.append(parts)
                    continue
                marks.append(device.mark())  # hashed at once, while it is in the cache
                sums.add(parts)
                marks.append(device.mark())
            if device.queues:
                device.laying(reported)()
                marks.append(device.mark())
                for parts in filled:
                    sums.add(parts)
                sums.begin()
                marks.append(device.mark())
        return Filled(sums, device.after() if unit.staged_bytes else None, marks)

    def fill_here(self, unit: Unit, at: int, maxima: list[tuple[Floats, Ints] | None]) -> Filled:
        """Do the same on a worker thread, and wait until it is done."""
        filled = self.fill(unit, at, maxima)
        self.device.finish()
        return filled

    def seconds(self, filled: Filled) -> tuple[float, float]:
        """Return how long a unit was converted and hashed, once it is."""
        steps = [self.device.seconds(*pair) for pair in pairwise(filled.marks)]
        return sum(steps[::2]), sum(steps[1::2])

    def _left(self, box: ShardBox, sums: Sums) -> bool:
        """Leave the checksum of a box to the rail that gathers it, if it is of the rail's kind."""
        return box.gathered and isinstance(sums, HostSums) and sums.leave()

    def _ordered(self, box: ShardBox, at: int, sums: Sums) -> bool:
        """Put a box in order and hash it in one pass, if it is one for that."""
        if box.lies is None or not isinstance(sums, HostSums):
            return False
        assert self.memory is not None
        region, base = box.source(self._shards)
        part = Stretch(self._shards.memory(region), box.lies, base)
        return sums.order(self.memory[at : at + box.weight_bytes], part, len(self.memory) >= PAST_CACHES_BYTES)

    def _parts(
        self, box: ShardBox, at: int, found: tuple[Floats, Ints] | None, reported: list[PlacedBox]
    ) -> list[Stretch]:
        """Return where a box is as it is written, once what is added to `reported` is laid."""
        if box.how is not None:
            assert self.memory is not None
            scales_at = at + box.scales_staged_at
            reported.append(PlacedBox(box.how, self.memory, at, scales_at))
            weights = stretch(self.memory, at, box.weight_bytes)
            return [weights, stretch(self.memory, scales_at, box.scale_bytes)] if box.scale_bytes else [weights]
        parts = [self._weights(box, at, found)]
        if box.scale_bytes:
            assert self.memory is not None and found is not None
            scales_at = at + box.scales_staged_at
            self.device.put(self.memory[scales_at : scales_at + box.scale_bytes], _scales(box, *found))
            parts.append(stretch(self.memory, scales_at, box.scale_bytes))
        return parts

    def _weights(self, box: ShardBox, at: int, found: tuple[Floats, Ints] | None) -> Stretch:
        """Return where the weights of a box are once they are as they are written."""
        if box.direct is not None:
            region, base = box.source(self._shards)
            return Stretch(self._shards.memory(region), box.direct, base)
        assert self.memory is not None
        staged = stretch(self.memory, at, box.weight_bytes)
        source = self._shards.box(box.parameter, box.local_start, box.size)
        maxima, origin = found if found is not None else (None, box.origin)
        self.device.convert(
            self.memory[at : at + box.weight_bytes],
            box.sizes,
            box.axes,
            source,
            box.kind,
            maxima,
            box.start,
            origin,
        )
        return staged

    def _ready(self, unit: Unit, at: int) -> _FilledUnit | None:
        """Return what is made once of a unit; None for one that is converted box by box."""
        if not self.quick(unit) or any(box.how is None and box.direct is None for box in unit.boxes):
            return None
        key = at, self._kind, None if self._staging is None else self._staging.region.id
        found: _FilledUnit | None = unit.ready.get(key)
        if found is None:
            reported: list[PlacedBox] = []
            parts, begin = [], at
            for box in unit.boxes:
                parts.append(self._parts(box, begin, None, reported))
                begin += box.staged_bytes
            lay, add = self.device.laying(reported), self.device.summing(self._kind, parts)
            found = unit.ready[key] = _FilledUnit(lay, add, self._runs(unit, at))
        return found

    def _begin(self, unit: Unit, ready: _FilledUnit) -> Filled:
        device = self.device
        with device.working():
            marks = [device.mark()]
            ready.lay()
            marks.append(device.mark())
            sums = ready.sum(range(len(unit.boxes)))
            sums.begin()
            marks.append(device.mark())
        return Filled(sums, device.after() if unit.staged_bytes else None, marks)

    def runs(self, unit: Unit, at: int) -> list[FilledRun]:
        """Return the runs of a unit, those of one region, receiver and length together."""
        ready = self._ready(unit, at)
        return self._runs(unit, at) if ready is None else ready.runs

    def _runs(self, unit: Unit, at: int) -> list[FilledRun]:
        found: dict[tuple[int, str, int], tuple[Region, list[Ints], list[Ints]]] = {}

        def add(region: Region, receiver: str, run_bytes: int, sources: Ints, targets: Ints) -> None:
            entry = found.setdefault((region.id, receiver, run_bytes), (region, [], []))
            entry[1].append(sources)
            entry[2].append(targets)

        for box in unit.boxes:
            if box.gathered:
                continue
            scales_at = at + box.scales_staged_at
            region, base = (None, at) if box.direct is None else box.source(self._shards)
            for row in box.rows:
                shape, size = row.shape, row.run_bytes
                targets = shape.weights.offsets(size) + row.weights_at
                if box.direct is not None:
                    sources = box.direct.offsets(size) + base
                else:
                    sources = base + np.arange(len(targets), dtype=np.int64) * size
                add(region or self._staged, row.receiver, size, sources, targets)
                if shape.scales is not None:
                    size = shape.scale_run_bytes
                    add(
                        self._staged,
                        row.receiver,
                        size,
                        scales_at + np.arange(shape.scale_runs) * size,
                        shape.scales.offsets(size) + row.scales_at,
                    )
            at += box.staged_bytes
        return [
            FilledRun(region, receiver, run_bytes, np.concatenate(sources), np.concatenate(targets))
            for (_, receiver, run_bytes), (region, sources, targets) in found.items()
        ]

    def gathered(self, unit: Unit) -> list[Gathered]:
        """Return what the rail gathers of a unit."""
        return unit.gathered(self._shards)

    @property
    def _staged(self) -> Region:
        assert self._staging is not None
        return self._staging.region


def _scales(box: ShardBox, maxima: Floats, origin: Ints) -> Floats:
    """Return the scales that a box writes, in the order in which they lie at the receiver."""
    shape = box.rows[0].shape
    first = -(-box.start[-2:] // BLOCK) - origin[-2:] // BLOCK
    lead = box.start[:-2] - origin[:-2]
    count = -(-(box.start + np.array(box.size))[-2:] // BLOCK) - -(-box.start[-2:] // BLOCK)
    begin, size = [*lead.tolist(), *first.tolist()], [*box.size[:-2], *count.tolist()]
    values = scales_of(maxima[tuple(slice(a, a + b) for a, b in zip(begin, size, strict=True))])
    whole = [dim for dim in range(len(size)) if dim not in shape.scale_order] + shape.scale_order
    return np.ascontiguousarray(values.transpose(whole), "<f4")
