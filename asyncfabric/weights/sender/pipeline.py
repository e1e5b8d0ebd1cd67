"""WeightSending: one version of one trainer on its way: bring, convert and hash, write, retire, as concurrent stages.

Runs on the event loop's thread; converting runs on worker threads, or on a GPU, which writes wait for by themselves.
What is converted and not yet written is bounded by the staging memory, what is written and not yet ended by that and by
a number of page entries.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic

import anyio
import numpy as np

from asyncfabric import BrokenError, BusyError, Fabric, FabricError, Region, RegionKey, Transfer
from asyncfabric._api.boxes import GatheredSums, write_boxes
from asyncfabric._groups import unwrapped
from asyncfabric._notice import Notice
from asyncfabric._queue import Queue
from asyncfabric.weights.channel import COORDINATOR, Send
from asyncfabric.weights.memory.checksums import ChecksumKind
from asyncfabric.weights.memory.host import HostSums
from asyncfabric.weights.messages import Unreachable
from asyncfabric.weights.plan.boxes import Ints
from asyncfabric.weights.sender.coded import CodedSending
from asyncfabric.weights.sender.exchange import Exchange, Floats
from asyncfabric.weights.sender.filling import Filled, UnitFiller
from asyncfabric.weights.sender.program import Program, Unit
from asyncfabric.weights.sender.scratch import PAGES_IN_FLIGHT, ScratchStaging
from asyncfabric.weights.sender.shards import Gathered, Shards
from asyncfabric.weights.sender.version import Stages
from asyncfabric.weights.threads import in_thread
from asyncfabric.weights.writing import (
    LONG_RUN_BYTES,
    MOST_PAGES,
    Gate,
    Reporter,
    report_messages,
    shares_of,
    write_runs,
)

UNITS_READY, UNITS_IN_FLIGHT = 4, 64

QUEUED_IN_FLIGHT = 3
"""The same where the device queues, besides one that is awaited and one that was just posted. The first are small, and
the wire must not wait for the event loop; many more would end late, and together: a rail of a GPU begins 1 GiB, and the
engine serves all transfers alike that it cannot begin at once."""

UNITS_AHEAD = 2
"""There: converted before receivers have opened their memory; the first write waits for all that was begun by then."""


@dataclass(slots=True)
class _Ready:
    """A unit that is filled, or will be by what its device was given: where it is staged."""

    unit: Unit
    at: int
    filled: Filled
    posted: anyio.Event = field(default_factory=anyio.Event)


@dataclass(slots=True)
class _Posted:
    """A unit whose writes are under way."""

    unit: Unit
    at: int
    filled: Filled
    transfers: list[tuple[str, Transfer, int]] = field(default_factory=list)
    left: dict[Transfer, tuple[tuple[int, ...], GatheredSums]] = field(default_factory=dict)
    # numbers of boxes whose sums a transfer brings, and these
    after: dict[str, int] | None = (
        None  # by receiver: what it has counted once all of it is there; None: not all posted
    )
    reported: bool = False

    def take_sums(self, transfer: Transfer) -> None:
        """Take what a transfer that has ended well found out about boxes."""
        if transfer in self.left:
            numbers, sums = self.left[transfer]
            assert isinstance(self.filled.sums, HostSums)
            self.filled.sums.take(numbers, sums.tolist())


class WeightSending:
    """One version on its way."""

    def __init__(
        self,
        fabric: Fabric,
        shards: Shards,
        staging: ScratchStaging | None,
        exchange: Exchange,
        version: int,
        send: Send,
        kind: ChecksumKind = "xxh3",
    ) -> None:
        """Convert what goes into the staging memory; nothing is written before `open`.

        Rows are reported to their receivers soon after writes have ended, or, where the device queues, when they are
        next and all before them have. A receiver that cannot be written to is reported to the coordinator once, and
        the others go on. `kind` is of the checksums.
        """
        self.stages: Stages = Stages()
        self.kind: ChecksumKind = kind
        self._fabric = fabric
        self._staging = staging
        self._filler = UnitFiller(shards, staging, kind)
        self._exchange = exchange
        self._shards = shards
        self._samples = shards.samples()
        self._gates: dict[str, Gate] = {}
        self._version = version
        self._send = send
        self._coded: CodedSending | None = None
        self._opened = anyio.Event()
        self._began = monotonic()
        self._counted: Counter[str] = Counter()
        self._pages = 0
        self._page_room = Notice()
        self._ready: Queue[_Ready] = Queue(UNITS_READY)
        self._unposted = 0
        self._in_flight: deque[_Posted] = deque()

    def open(self, gates: Mapping[str, Gate], coded: CodedSending | None = None) -> None:
        """Begin to write: to the receivers that have gates, and to those with lanes in `coded`; others are left out."""
        self._gates.update(gates)
        self._coded = coded
        self._began = monotonic()
        self._opened.set()

    async def run(self, program: Program, unit_bytes: int) -> None:
        """Send everything; returns when every write has ended. What can be staged meanwhile is, before `open` too.

        Cancellation: stops posting, and goes on when what was posted has drained (INV-2).
        """
        self._reporter = Reporter(self._send_report, shares_of(self._gates, program.bytes_to))
        try:
            with unwrapped():
                async with anyio.create_task_group() as tasks:
                    device = self._filler.device
                    posted: Queue[_Posted] = Queue(QUEUED_IN_FLIGHT if device.queues else UNITS_IN_FLIGHT)
                    units = program.units(unit_bytes, device.first_unit_bytes, device.last_unit_bytes)
                    self._unposted = len(units)
                    tasks.start_soon(self._prepare, units)
                    tasks.start_soon(self._post_all, posted)
                    tasks.start_soon(self._retire, posted)
                    tasks.start_soon(self._reporter.run)
        finally:
            with anyio.CancelScope(shield=True):
                await self._drain()
                if self._coded is not None:
                    await self._coded.drain()
            if self._staging is not None:
                self._staging.clear()
            self.stages.write_s = monotonic() - self._began

    # ---- bring, convert, hash

    async def _prepare(self, units: list[Unit]) -> None:
        ready = self._ready
        turns = anyio.Semaphore(self._filler.device.fills)

        async def fill(unit: Unit, at: int, maxima: list[tuple[Floats, Ints] | None]) -> None:
            filled = await in_thread(self._filler.fill_here, unit, at, maxima)
            await ready.put(_Ready(unit, at, filled))  # whichever is filled first is written first
            turns.release()

        with unwrapped():
            async with anyio.create_task_group() as tasks:
                for unit in units:
                    at, begin = 0, monotonic()
                    if unit.staged_bytes:
                        assert self._staging is not None
                        at = await self._staging.take(unit.staged_bytes)
                    self.stages.staging_wait_s += monotonic() - begin
                    if self._filler.device.queues and len(ready) == UNITS_AHEAD:
                        await self._opened.wait()
                    begin = monotonic()
                    maxima = [
                        await self._exchange.ready((box.parameter_number, box.kind_number)) if box.measured else None
                        for box in unit.boxes
                    ]
                    self.stages.maxima_wait_s += monotonic() - begin
                    if self._filler.quick(unit) or self._filler.idle(unit):
                        one = _Ready(unit, at, self._filler.fill(unit, at, maxima))
                        await ready.put(one)
                        if self._opened.is_set():
                            await one.posted.wait()  # its writes wait for no more than what was begun so far
                    else:
                        await turns.acquire()
                        tasks.start_soon(fill, unit, at, maxima)
        ready.close()

    # ---- write

    async def _post_all(self, posted: Queue[_Posted]) -> None:
        await self._opened.wait()
        async for prepared in self._ready:
            unit, at, filled = prepared.unit, prepared.at, prepared.filled
            one = _Posted(unit, at, filled)
            self._in_flight.append(one)
            for run in self._filler.runs(unit, at):
                await self._post(one, *run)
            for batch in self._filler.gathered(unit):
                await self._post_gathered(one, batch)
            one.after = dict(self._counted)
            self._unposted -= 1
            prepared.posted.set()
            if self._coded is not None:
                await self._coded.take(unit, self._filler.memory, at, filled.sums.result())
            await posted.put(one)
        if self._coded is not None:
            await self._coded.finish()
        posted.close()

    async def _post(
        self, one: _Posted, region: Region, receiver: str, run_bytes: int, sources: Ints, targets: Ints
    ) -> None:
        gate = self._gates.get(receiver)
        if gate is None:
            return
        step = MOST_PAGES if run_bytes < LONG_RUN_BYTES else 1
        for key, which, behind in gate.memory.split(targets):
            for low in range(0, len(which), step):
                pages, to = sources[which[low : low + step]], behind[low : low + step]

                def write(gate: Gate, key: RegionKey = key, pages: Ints = pages, to: Ints = to) -> Transfer:
                    return write_runs(self._fabric, region, pages, key, to, run_bytes, gate.imm, one.filled.after)

                await self._submit(one, receiver, len(pages), write)

    async def _post_gathered(self, one: _Posted, batch: Gathered) -> None:
        def write(gate: Gate) -> Transfer:
            (key,) = gate.memory.keys  # what is gathered goes into memory of the engine's own, which lies in one piece
            transfer, sums = write_boxes(self._fabric, batch.region, batch.boxes, key, gate.imm)
            if self.kind == "xxh3":
                one.left[transfer] = (batch.numbers, sums)
            return transfer

        await self._submit(one, batch.receiver, len(batch.boxes), write)

    async def _submit(self, one: _Posted, receiver: str, pages: int, write: Callable[[Gate], Transfer]) -> None:
        """Post one call to a receiver that is still written to, when there is room; it counts `pages` arrivals."""
        while self._pages >= PAGES_IN_FLIGHT:
            await self._page_room.wait()
        while (gate := self._gates.get(receiver)) is not None:
            try:
                transfer = write(gate)
            except BusyError:
                await self._fabric.wait_writable()
                continue
            except FabricError as error:
                await self._give_up(receiver, error)
                break
            one.transfers.append((receiver, transfer, pages))
            self._pages += pages
            self._counted[receiver] += pages
            self.stages.writes += pages
            self.stages.bytes += transfer.total_bytes
            break

    # ---- retire

    async def _retire(self, posted: Queue[_Posted]) -> None:
        async for one in posted:
            self._report_ahead()
            for receiver, transfer, pages in one.transfers:
                try:
                    await transfer
                except FabricError as error:  # if no receiver gets a box, none gets its checksum
                    await self._give_up(receiver, error)
                else:
                    one.take_sums(transfer)
                self._pages -= pages
                self._page_room.notify()
            self._report(one)
            self._in_flight.popleft()
            if one.unit.staged_bytes:
                assert self._staging is not None
                self._staging.give_back(one.at)
            convert_s, checksum_s = self._filler.seconds(one.filled)
            self.stages.convert_s += convert_s
            self.stages.checksum_s += checksum_s
        self._reporter.finish()

    def _report_ahead(self) -> None:
        """Report what was hashed and will be written soon: receivers need no message any more when it is there."""
        if self._filler.device.queues:
            for one in self._in_flight:
                if one.after is not None and one.filled.sums.ready():
                    self._report(one)
            if not self._unposted and all(one.reported for one in self._in_flight):
                self._reporter.finish()

    def _report(self, one: _Posted) -> None:
        if one.reported:
            return
        one.reported = True
        if not self._unposted and one is self._in_flight[-1]:
            self._check_unchanged()
        counts = one.after if one.after is not None and self._filler.device.queues else {}
        for box, checksum in zip(one.unit.boxes, one.filled.sums.result(), strict=True):
            for row in box.rows:
                if row.receiver in self._gates:
                    self._reporter.add(row.receiver, row.row, checksum, row.shape.nbytes, counts.get(row.receiver, 0))

    async def _send_report(self, receiver: str, rows: list[int], sums: list[int], after: int) -> None:
        for message in report_messages(self._version, rows, sums, self.kind, after):
            await self._send(receiver, message)

    def _check_unchanged(self) -> None:
        """Raise BrokenError if shards changed meanwhile: before the last unit is reported, so no receiver commits."""
        if not all(map(np.array_equal, self._samples, self._shards.samples())):
            raise BrokenError(
                "weights changed while they were published, so what was sent is of two steps",
                remedy="await publish() before the next step of the optimizer, then publish a later version",
            )

    async def _give_up(self, receiver: str, error: FabricError) -> None:
        if self._gates.pop(receiver, None) is not None:
            await self._send(COORDINATOR, Unreachable(self._version, receiver, str(error)[:2000]))

    async def _drain(self) -> None:
        """Return when nothing reads the staging memory or the shards any more."""
        self._filler.device.finish()
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
