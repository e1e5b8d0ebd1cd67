"""Filling: a unit's boxes converted into the staging memory, hashed, and said as runs to write.

`fill` is for a worker thread and lets go of the GIL; everything else is of the event loop's thread.
"""

from __future__ import annotations

from threading import Lock
from time import monotonic

import numpy as np

from asyncfabric import Region
from asyncfabric.weights.arithmetic import scales_of
from asyncfabric.weights.boxes import Ints
from asyncfabric.weights.commit.checksums import ChecksumKind
from asyncfabric.weights.formats import BLOCK
from asyncfabric.weights.update.device import Device, Memory, Stretch, stretch
from asyncfabric.weights.update.exchange import Floats
from asyncfabric.weights.update.program import Box, Unit
from asyncfabric.weights.update.shards import Shards
from asyncfabric.weights.update.staging import Staging

Runs = tuple[Region, list[Ints], list[Ints]]
"""Of equal length: where they lie, where they begin there, where they go."""


class Filler:
    """Fills the staging memory of one trainer for one version.

    Attributes:
        device: of the shards and of the staging memory.
        memory: the staging memory, None when nothing is staged.
        convert_s, checksum_s: seconds spent so far, by all threads together.
    """

    def __init__(self, shards: Shards, staging: Staging | None, kind: ChecksumKind) -> None:
        """Read shards; `staging` is None when nothing is converted."""
        self.device: Device = shards.device
        self._kind: ChecksumKind = kind
        self.memory: Memory | None = None if staging is None else self.device.memory_of(staging.region)
        self.convert_s: float = 0.0
        self.checksum_s: float = 0.0
        self._lock = Lock()
        self._shards = shards
        self._staging = staging

    def fill(self, unit: Unit, at: int, maxima: list[tuple[Floats, Ints] | None]) -> list[int]:
        """Convert and stage a unit at `at`; returns the checksum of each box. For a worker thread."""
        sums = self.device.sums(self._kind)
        convert_s = checksum_s = 0.0
        for box, found in zip(unit.boxes, maxima, strict=True):
            begin = monotonic()
            parts = [self._weights(box, at, found)]
            if box.scale_bytes:
                assert self.memory is not None and found is not None
                scales_at = at + box.scales_staged_at
                self.device.put(self.memory[scales_at : scales_at + box.scale_bytes], _scales(box, *found))
                parts.append(stretch(self.memory, scales_at, box.scale_bytes))
            middle = monotonic()
            sums.add(parts)
            at += box.staged_bytes
            convert_s += middle - begin
            checksum_s += monotonic() - middle
        begin = monotonic()
        self.device.finish()
        middle = monotonic()
        result = sums.result()
        with self._lock:
            self.convert_s += convert_s + middle - begin
            self.checksum_s += checksum_s + monotonic() - middle
        return result

    def _weights(self, box: Box, at: int, found: tuple[Floats, Ints] | None) -> Stretch:
        """Return where the weights of a box are once they are as they are written."""
        if box.direct is not None:
            region, base = box.source(self._shards)
            return Stretch(self._shards.memory(region), box.direct, base)
        assert self.memory is not None
        staged = stretch(self.memory, at, box.weight_bytes)
        source = self._shards.box(box.parameter, box.local_start, box.size)
        maxima, origin = found if found is not None else (None, box.origin)
        self.device.convert(
            self.memory[at : at + box.weight_bytes], box.sizes, box.axes, source, box.kind, maxima, box.start, origin,
        )  # fmt: skip
        return staged

    def runs(self, unit: Unit, at: int) -> dict[tuple[int, str, int], Runs]:
        """Return the runs of a unit, by (source region, receiver, bytes of a run)."""
        found: dict[tuple[int, str, int], Runs] = {}

        def add(region: Region, receiver: str, run_bytes: int, sources: Ints, targets: Ints) -> None:
            entry = found.setdefault((region.id, receiver, run_bytes), (region, [], []))
            entry[1].append(sources)
            entry[2].append(targets)

        for box in unit.boxes:
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
                        self._staged, row.receiver, size, scales_at + np.arange(shape.scale_runs) * size,
                        shape.scales.offsets(size) + row.scales_at,
                    )  # fmt: skip
            at += box.staged_bytes
        return found

    @property
    def _staged(self) -> Region:
        assert self._staging is not None
        return self._staging.region


def _scales(box: Box, maxima: Floats, origin: Ints) -> Floats:
    """Return the scales that a box writes, in the order in which they lie at the receiver."""
    shape = box.rows[0].shape
    first = -(-box.start[-2:] // BLOCK) - origin[-2:] // BLOCK
    lead = box.start[:-2] - origin[:-2]
    count = -(-(box.start + np.array(box.size))[-2:] // BLOCK) - -(-box.start[-2:] // BLOCK)
    begin, size = [*lead.tolist(), *first.tolist()], [*box.size[:-2], *count.tolist()]
    values = scales_of(maxima[tuple(slice(a, a + b) for a, b in zip(begin, size, strict=True))])
    whole = [dim for dim in range(len(size)) if dim not in shape.scale_order] + shape.scale_order
    return np.ascontiguousarray(values.transpose(whole), "<f4")
