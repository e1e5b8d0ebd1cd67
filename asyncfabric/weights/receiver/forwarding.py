"""Forwarding: a receiver passes on what it has received and checked, to other receivers, row by row.

Runs on the event loop's thread. The checksum that the trainer gave travels along, so that a byte that changes at the
receiver between is found at the next one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import anyio
import numpy as np
from anyio.abc import TaskGroup

from asyncfabric import BusyError, Fabric, FabricError, Region, Transfer
from asyncfabric._notice import Notice
from asyncfabric.weights.channel import COORDINATOR, receiver_name
from asyncfabric.weights.memory.checksums import ChecksumKind
from asyncfabric.weights.memory.device import Device, Stretch
from asyncfabric.weights.memory.rows import Strided, written_run_bytes
from asyncfabric.weights.messages import CodedSlots, Unreachable
from asyncfabric.weights.outbox import Outbox
from asyncfabric.weights.plan.batch import ReportShare, forwarded_by
from asyncfabric.weights.plan.plan import Plan
from asyncfabric.weights.receiver.awaited import RowPlaces
from asyncfabric.weights.receiver.coded_forwarding import CodedForwarding, Forms, Passed
from asyncfabric.weights.receiver.copies import Copy
from asyncfabric.weights.threads import in_thread
from asyncfabric.weights.writing import (
    LONG_RUN_BYTES,
    MOST_PAGES,
    Gate,
    Report,
    Reporter,
    report_messages,
    settle,
    write_runs,
)

BATCHES = 4
"""Batches of rows under way at once."""


class ReReports:
    """The reports of one receiver about one version that it passes on: to those it feeds, and to the coordinator."""

    def __init__(self, version: int, outbox: Outbox) -> None:
        """Report by an outbox."""
        self._version = version
        self._outbox = outbox
        self._reporters: dict[ChecksumKind, Reporter] = {}  # each trainer's checksums travel along, of its kind
        self._tasks: TaskGroup | None = None
        self._share_of: Callable[[str], ReportShare | None] | None = None

    def begin(self, tasks: TaskGroup, share_of: Callable[[str], ReportShare | None]) -> None:
        """Report by tasks of this group, which ends after `finish`."""
        self._tasks = tasks
        self._share_of = share_of

    def add(self, receiver: str, rows: list[int], sums: list[int], sizes: list[int], kind: ChecksumKind) -> None:
        """Note rows of a receiver that are written, their checksums and bytes."""
        reporter = self._reporters.get(kind)
        if reporter is None:
            assert self._tasks is not None
            reporter = self._reporters[kind] = Reporter(self._report_of(kind), self._share_of)
            self._tasks.start_soon(reporter.run)
        for row, checksum, size in zip(rows, sums, sizes, strict=True):
            reporter.add(receiver, row, checksum, size)

    def finish(self) -> None:
        """Note that everything is passed on: the rest is reported at once."""
        for reporter in self._reporters.values():
            reporter.finish()

    def unreachable(self, receiver: str, error: FabricError) -> None:
        """Report a receiver that cannot be written to."""
        self._outbox.put(COORDINATOR, Unreachable(self._version, receiver, str(error)[:2000]))

    def _report_of(self, kind: ChecksumKind) -> Report:
        async def report(receiver: str, rows: list[int], sums: list[int], after: int) -> None:
            for message in report_messages(self._version, rows, sums, kind, after):
                self._outbox.put(receiver, message)

        return report


class Forwarding:
    """What one receiver passes on of one version.

    Attributes:
        coded: what sends them coded to whoever reads that, None when this receiver writes no coding.
        gates: to receivers that opened; bytes_to: of everything that is for them.
    """

    def __init__(
        self,
        fabric: Fabric,
        plan: Plan,
        name: str,
        receiver: int,
        copy: Copy,
        reports: ReReports,
        coded: CodedForwarding | None = None,
    ) -> None:
        """Look up who wants what; rows that are written, and receivers that cannot be written to, go to `reports`."""
        self._fabric = fabric
        self._copy = copy
        self._reports = reports
        self.coded: CodedForwarding | None = coded
        self.gates: dict[str, Gate] = {}
        self.bytes_to: dict[str, int] = {}
        self._given_up: set[str] = set()
        self._changed = Notice()
        self._room = anyio.Semaphore(BATCHES)
        self._here = RowPlaces(plan, receiver, copy.layout)
        self._there: dict[int, RowPlaces] = {}
        self._wanted: dict[int, list[tuple[str, int, int]]] = defaultdict(list)  # row here: (to, receiver, row there)
        reported = forwarded_by(plan, name, receiver)
        who = reported.replica.astype(np.int64) * plan.receivers + reported.receiver
        sizes = np.bincount(who, weights=plan.piece_bytes[plan.row_piece[reported.to_row]])
        for number in np.unique(who).tolist():
            one, rank = divmod(number, plan.receivers)
            self.bytes_to[receiver_name(plan.replicas[one].name, rank)] = int(sizes[number])
        for replica, to, here, there in zip(
            reported.replica.tolist(),
            reported.receiver.tolist(),
            reported.from_row.tolist(),
            reported.to_row.tolist(),
            strict=True,
        ):
            name_there = receiver_name(plan.replicas[replica].name, to)
            self._wanted[here].append((name_there, to, there))
            if coded is not None:
                coded.want(name_there, here)
            if to not in self._there:
                self._there[to] = RowPlaces(plan, to)

    @property
    def needed(self) -> bool:
        """Whether anybody wants anything from this receiver."""
        return bool(self._wanted)

    @property
    def rows(self) -> list[int]:
        """The rows of this receiver that are wanted elsewhere."""
        return list(self._wanted)

    def open(self, receiver: str, gate: Gate, coded_slots: CodedSlots | None) -> None:
        """Take the key of a receiver, and where it takes coded rows."""
        self.gates[receiver] = gate
        if self.coded is not None:
            self.coded.open(receiver, coded_slots)
        self._changed.notify()

    async def forward(self, rows: list[int], sums: list[int], kind: ChecksumKind) -> None:
        """Pass on what is wanted elsewhere of these rows; returns when the writes have ended.

        Cancellation: stops posting, and goes on when what was posted has drained.
        """
        by_receiver: dict[str, list[Passed]] = defaultdict(list)
        for row, checksum in zip(rows, sums, strict=True):
            for name, receiver, there in self._wanted.get(row, ()):
                by_receiver[name].append((row, receiver, there, checksum))
        forms: Forms = {}
        for name, wanted in by_receiver.items():
            while name not in self.gates and name not in self._given_up:
                await self._changed.wait()
            if self.coded is None:
                async with self._room:
                    await self._pass_on(name, wanted, kind)
            elif name not in self._given_up and self.coded.codes(name):
                await self.coded.pass_on(name, wanted, kind, forms)
            else:
                async with self._room:
                    with self.coded.timed(name):
                        await self._pass_on(name, wanted, kind)

    async def _pass_on(self, name: str, wanted: list[Passed], kind: ChecksumKind) -> None:
        borrowed: list[Region] = []
        transfers: list[Transfer] = []
        try:
            try:
                for row, receiver, there, _ in wanted:
                    if name in self._given_up:
                        return
                    await self._post(self.gates[name], row, self._there[receiver], there, transfers, borrowed)
            except FabricError as error:
                self._give_up(name, error)
            finally:
                errors = await settle(transfers)
            failure = next((error for error in errors if error is not None), None)
            if failure is not None:
                self._give_up(name, failure)
            if name not in self._given_up:
                sizes = [self._there[each[1]].shape(each[2]).nbytes for each in wanted]
                self._reports.add(name, [each[2] for each in wanted], [each[3] for each in wanted], sizes, kind)
        finally:
            with anyio.CancelScope(shield=True):
                for region in borrowed:
                    await region.release()

    async def _post(
        self, gate: Gate, row: int, there: RowPlaces, to: int, transfers: list[Transfer], borrowed: list[Region]
    ) -> None:
        mine, theirs = self._here.shape(row), there.shape(to)
        (mine_at, mine_scales_at), (at, scales_at) = self._here.places(row), there.places(to)
        parts: list[tuple[Strided, int, Strided, int, int]] = [
            (mine.weights, mine_at, theirs.weights, at, written_run_bytes(mine.weights, theirs.run_bytes))
        ]
        if mine.scales is not None and theirs.scales is not None:
            parts.append((mine.scales, mine_scales_at, theirs.scales, scales_at, theirs.scale_run_bytes))
        for source, begin, target, end, run_bytes in parts:
            if source.run_bytes >= run_bytes:
                region, moved = self._copy.lies_in(begin)
                pages = source.offsets(run_bytes) + (begin + moved)
            else:  # theirs has longer runs than ours: put ours in order first
                device = self._copy.device
                region = await self._fabric.allocate(source.nbytes, device=device.name, access="local")
                borrowed.append(region)
                await in_thread(_gather, device, region, Stretch(self._copy.memory, source, begin))
                pages = np.arange(source.nbytes // run_bytes, dtype=np.int64) * run_bytes
            step = MOST_PAGES if run_bytes < LONG_RUN_BYTES else 1
            for key, which, behind in gate.memory.split(target.offsets(run_bytes) + end):
                for low in range(0, len(which), step):
                    mine_here, to_pages = pages[which[low : low + step]], behind[low : low + step]
                    while True:
                        try:
                            transfers.append(
                                write_runs(self._fabric, region, mine_here, key, to_pages, run_bytes, gate.imm)
                            )
                            break
                        except BusyError:
                            await self._fabric.wait_writable()

    def _give_up(self, name: str, error: FabricError) -> None:
        if name not in self._given_up:
            self._given_up.add(name)
            self._reports.unreachable(name, error)


def _gather(device: Device, region: Region, part: Stretch) -> None:
    device.gather(device.memory_of(region), part)
    device.finish()
