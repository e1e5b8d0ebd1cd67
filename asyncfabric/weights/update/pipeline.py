"""Sending: one version of one trainer on its way: bring, convert and hash, write, retire, as concurrent stages.

Runs on the event loop's thread; converting runs on worker threads. What is converted and not yet written is bounded by
the staging memory, what is written and not yet ended by that and by a number of page entries.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from time import monotonic

import anyio
import numpy as np
import xxhash

from asyncfabric import BusyError, Fabric, FabricError, Region, Transfer
from asyncfabric.weights.arithmetic import scales_of
from asyncfabric.weights.boxes import Ints
from asyncfabric.weights.formats import BLOCK, STORED_AS
from asyncfabric.weights.update.coded_sending import CodedSending
from asyncfabric.weights.update.exchange import Exchange, Floats
from asyncfabric.weights.update.groups import unwrapped
from asyncfabric.weights.update.line import Line
from asyncfabric.weights.update.program import Box, Program, Unit
from asyncfabric.weights.update.rows import Bytes
from asyncfabric.weights.update.runs import LONG_RUN_BYTES, MOST_PAGES, Gate, write_runs
from asyncfabric.weights.update.shards import Shards
from asyncfabric.weights.update.staging import PLACE_ALIGN, Staging
from asyncfabric.weights.update.threads import in_thread
from asyncfabric.weights.update.tiles import convert_into

PAGES_IN_FLIGHT = 8 * MOST_PAGES
"""Pages whose writes have not ended, give or take one call: 16 bytes each in the engine."""


UNITS_READY, UNITS_IN_FLIGHT = 4, 64

_Ready = tuple[Unit, int, list[int]]
"""A unit, where it is staged, the checksum of each box."""


@dataclass(slots=True)
class Stages:
    """Seconds that each stage was busy, and what went through; stages overlap."""

    convert_s: float = 0.0
    checksum_s: float = 0.0
    write_s: float = 0.0
    staging_wait_s: float = 0.0
    maxima_wait_s: float = 0.0
    bytes: int = 0
    writes: int = 0


@dataclass(slots=True)
class _Posted:
    """A unit whose writes are under way."""

    unit: Unit
    sums: list[int]
    transfers: list[tuple[str, Transfer, int]] = field(default_factory=list)


class Sending:
    """One version on its way."""

    def __init__(
        self,
        fabric: Fabric,
        shards: Shards,
        staging: Staging | None,
        exchange: Exchange,
        gates: Mapping[str, Gate],
        written: Callable[[str, list[int], list[int]], Awaitable[None]],
        failed: Callable[[str, FabricError], Awaitable[None]],
        coded: CodedSending | None = None,
    ) -> None:
        """Send to the receivers that have gates, and to those that have lanes in `coded`; others are left out.

        `written` is called with (receiver, rows, checksums) once writes have ended; `failed` once for a receiver that
        cannot be written to, and the others go on.
        """
        self.stages: Stages = Stages()
        self._fabric = fabric
        self._shards = shards
        self._staging = staging
        self._memory: Bytes | None = None if staging is None else np.frombuffer(staging.region.memory, np.uint8)
        self._exchange = exchange
        self._gates = dict(gates)
        self._written = written
        self._failed = failed
        self._coded = coded
        self._pages = 0
        self._page_room = anyio.Event()
        self._in_flight: deque[_Posted] = deque()

    async def run(self, program: Program, unit_bytes: int) -> None:
        """Send everything; returns when every write has ended.

        Cancellation: stops posting, and goes on when what was posted has drained (INV-2).
        """
        began = monotonic()
        try:
            with unwrapped():
                async with anyio.create_task_group() as tasks:
                    ready: Line[_Ready] = Line(UNITS_READY)
                    posted: Line[_Posted] = Line(UNITS_IN_FLIGHT)
                    tasks.start_soon(self._prepare, program, unit_bytes, ready)
                    tasks.start_soon(self._post_all, ready, posted)
                    tasks.start_soon(self._retire, posted)
        finally:
            with anyio.CancelScope(shield=True):
                await self._drain()
                if self._coded is not None:
                    await self._coded.drain()
            if self._staging is not None:
                self._staging.clear()
            self.stages.write_s = monotonic() - began

    # ---- bring, convert, hash

    async def _prepare(self, program: Program, unit_bytes: int, ready: Line[_Ready]) -> None:
        for unit in program.units(unit_bytes):
            at, begin = 0, monotonic()
            if unit.staged_bytes:
                assert self._staging is not None
                at = await self._staging.take(unit.staged_bytes)
            self.stages.staging_wait_s += monotonic() - begin
            begin = monotonic()
            maxima = [
                await self._exchange.ready((box.parameter_number, box.kind_number)) if box.kind.block else None
                for box in unit.boxes
            ]
            self.stages.maxima_wait_s += monotonic() - begin
            await ready.put((unit, at, await in_thread(self._converted, unit, at, maxima)))
        ready.close()

    def _converted(self, unit: Unit, at: int, maxima: list[tuple[Floats, Ints] | None]) -> list[int]:
        """Fill the staging memory of a unit; returns the checksum of each box. On a worker thread."""
        sums = []
        for box, found in zip(unit.boxes, maxima, strict=True):
            begin = monotonic()
            weights: Iterable[Bytes]
            if box.direct is not None:
                region, base = self._from_shard(box)
                weights = box.direct.parts(np.frombuffer(region.memory, np.uint8), base)
            else:
                assert self._memory is not None
                staged = self._memory[at : at + box.weight_bytes]
                self._stage(box, staged, found)
                weights = (staged,)
                at += -(-box.weight_bytes // PLACE_ALIGN) * PLACE_ALIGN
            middle = monotonic()
            digest = xxhash.xxh3_64()
            for part in weights:
                digest.update(part.data)
            if box.scale_bytes:
                assert self._memory is not None and found is not None
                scales = self._memory[at : at + box.scale_bytes]
                _stage_scales(box, scales, *found)
                digest.update(scales.data)
                at += -(-box.scale_bytes // PLACE_ALIGN) * PLACE_ALIGN
            sums.append(digest.intdigest())
            self.stages.convert_s += middle - begin
            self.stages.checksum_s += monotonic() - middle
        return sums

    @property
    def _staged(self) -> Region:
        assert self._staging is not None
        return self._staging.region

    def _from_shard(self, box: Box) -> tuple[Region, int]:
        """Return where a box that is written from its shard begins."""
        place = self._shards.place(box.parameter)
        assert place is not None
        return place[0], place[1] + box.shard_at

    def _stage(self, box: Box, memory: Bytes, found: tuple[Floats, Ints] | None) -> None:
        source = self._shards.box(box.parameter, box.local_start, box.size)
        order = box.rows[0].shape.order
        whole = [dim for dim in range(len(box.size)) if dim not in order] + order  # those of length 1 anywhere
        out = memory.view(STORED_AS[box.kind.to]).reshape([box.size[dim] for dim in whole])
        maxima, origin = found if found is not None else (None, box.origin)
        convert_into(out.transpose(np.argsort(whole)), source, box.kind, maxima, box.start, origin)

    # ---- write

    async def _post_all(self, ready: Line[_Ready], posted: Line[_Posted]) -> None:
        async for unit, at, sums in ready:
            one = _Posted(unit, sums)
            self._in_flight.append(one)
            for (_, receiver, run_bytes), (region, sources, targets) in self._pages_of(unit, at).items():
                await self._post(one, region, receiver, run_bytes, np.concatenate(sources), np.concatenate(targets))
            if self._coded is not None:
                await self._coded.take(unit, self._memory, at, sums)
            await posted.put(one)
        if self._coded is not None:
            await self._coded.finish()
        posted.close()

    def _pages_of(self, unit: Unit, at: int) -> dict[tuple[int, str, int], tuple[Region, list[Ints], list[Ints]]]:
        """Return the runs of a unit, by (source region, receiver, bytes of a run)."""
        found: dict[tuple[int, str, int], tuple[Region, list[Ints], list[Ints]]] = {}

        def add(region: Region, receiver: str, run_bytes: int, sources: Ints, targets: Ints) -> None:
            entry = found.setdefault((region.id, receiver, run_bytes), (region, [], []))
            entry[1].append(sources)
            entry[2].append(targets)

        for box in unit.boxes:
            scales_at = at
            region, base = (None, at) if box.direct is None else self._from_shard(box)
            if box.direct is None:
                scales_at += -(-box.weight_bytes // PLACE_ALIGN) * PLACE_ALIGN
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
            at = scales_at + -(-box.scale_bytes // PLACE_ALIGN) * PLACE_ALIGN
        return found

    async def _post(
        self, one: _Posted, region: Region, receiver: str, run_bytes: int, sources: Ints, targets: Ints
    ) -> None:
        step = MOST_PAGES if run_bytes < LONG_RUN_BYTES else 1
        for low in range(0, len(sources), step):
            pages, to = sources[low : low + step], targets[low : low + step]
            while self._pages >= PAGES_IN_FLIGHT:
                await self._page_room.wait()
            while (gate := self._gates.get(receiver)) is not None:
                try:
                    transfer = write_runs(self._fabric, region, pages, gate, to, run_bytes)
                except BusyError:
                    await self._fabric.wait_writable()
                    continue
                except FabricError as error:
                    await self._give_up(receiver, error)
                    break
                one.transfers.append((receiver, transfer, len(pages)))
                self._pages += len(pages)
                self.stages.writes += len(pages)
                self.stages.bytes += transfer.total_bytes
                break

    # ---- retire

    async def _retire(self, posted: Line[_Posted]) -> None:
        async for one in posted:
            for receiver, transfer, pages in one.transfers:
                try:
                    await transfer
                except FabricError as error:
                    await self._give_up(receiver, error)
                self._pages -= pages
                self._page_room.set()
                self._page_room = anyio.Event()
            self._in_flight.popleft()
            if one.unit.staged_bytes:
                assert self._staging is not None
                self._staging.give_back()
            told: dict[str, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
            for box, checksum in zip(one.unit.boxes, one.sums, strict=True):
                for row in box.rows:
                    if row.receiver in self._gates:
                        told[row.receiver][0].append(row.row)
                        told[row.receiver][1].append(checksum)
            for receiver, (rows, sums) in told.items():
                await self._written(receiver, rows, sums)

    async def _give_up(self, receiver: str, error: FabricError) -> None:
        if self._gates.pop(receiver, None) is not None:
            await self._failed(receiver, error)

    async def _drain(self) -> None:
        """Return when nothing reads the staging memory or the shards any more."""
        for one in self._in_flight:
            for _, transfer, _ in one.transfers:
                transfer.cancel()
        for one in self._in_flight:
            for _, transfer, _ in one.transfers:
                try:
                    await transfer
                except FabricError:
                    pass  # it was cancelled, or its receiver is gone
        self._in_flight.clear()


def _stage_scales(box: Box, memory: Bytes, maxima: Floats, origin: Ints) -> None:
    """Put the scales that a box writes into memory, in the order in which they lie at the receiver."""
    shape = box.rows[0].shape
    first = -(-box.start[-2:] // BLOCK) - origin[-2:] // BLOCK
    lead = box.start[:-2] - origin[:-2]
    count = -(-(box.start + np.array(box.size))[-2:] // BLOCK) - -(-box.start[-2:] // BLOCK)
    begin, size = [*lead.tolist(), *first.tolist()], [*box.size[:-2], *count.tolist()]
    values = scales_of(maxima[tuple(slice(a, a + b) for a, b in zip(begin, size, strict=True))])
    whole = [dim for dim in range(len(size)) if dim not in shape.scale_order] + shape.scale_order
    memory.view("<f4").reshape([size[dim] for dim in whole])[...] = values.transpose(whole)
