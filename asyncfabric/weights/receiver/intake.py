"""Intake: one version on its way into one receiver: counters, checksums row by row, and what is complete.

Runs on the event loop's thread; hashing runs on worker threads. A row is checked when its sender reports it as
written, while others still arrive; a row that is not right then is checked again when every arrival is counted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from time import monotonic

import anyio
import numpy as np
from anyio.lowlevel import checkpoint

from asyncfabric import BrokenError, Fabric, ImmCounter, RemoteProtocolError
from asyncfabric._groups import unwrapped
from asyncfabric._queue import Queue
from asyncfabric.weights.memory.checksums import ChecksumKind
from asyncfabric.weights.memory.device import Sums
from asyncfabric.weights.messages import Written
from asyncfabric.weights.plan.boxes import Ints
from asyncfabric.weights.plan.plan import Plan
from asyncfabric.weights.receiver.awaited import Columns, Reported, RowPlaces, sender_name
from asyncfabric.weights.receiver.copies import Copy
from asyncfabric.weights.threads import in_thread

SOON_S = 0.0005
"""A device that queues is asked so long, turn by turn, before a thread waits for it."""


def compared(found: Sums, sums: list[int]) -> list[bool]:
    """Return which are equal, once all have been worked out; on any thread."""
    return [mine == reported for mine, reported in zip(found.result(), sums, strict=True)]


async def compared_soon(found: Sums, sums: list[int]) -> list[bool]:
    """Return the same on the event loop, where a thread would be woken later than the device is done.

    Cancellation: the device goes on; a thread that waits for it is waited for.
    """
    until = monotonic() + SOON_S
    while not found.ready():
        if monotonic() > until:
            return await in_thread(compared, found, sums)
        await checkpoint()
    return compared(found, sums)


TRIP_BYTES = 8 << 20
"""One thread hashes so many at a time where several do: what is left in the end is shared out among them. A device that
queues does them one after the other whichever thread begins it."""

Verified = Callable[[list[int], list[int], ChecksumKind], Awaitable[None]]
"""Called with rows that are right, and their checksums, in no order."""


class Intake:
    """One version on its way into a copy.

    Attributes:
        places, copy: where rows lie, and what they are written into.
        rows: of the plan, that it awaits; total_bytes: of them.
        names: of the senders, and their numbers in `Replica.senders`.
    """

    def __init__(self, fabric: Fabric, plan: Plan, places: RowPlaces, name: str, copy: Copy) -> None:
        """Open the counters of a version that goes into a copy; `plan` is the one with its replicas."""
        self._plan = plan
        self.places: RowPlaces = places
        self.copy: Copy = copy
        rows, senders, targets = places.awaited(name)
        self.rows: Ints = rows
        self._senders: Ints = senders
        self._targets: dict[int, int] = targets
        self.names: dict[str, int] = {sender_name(plan, name, number): number for number in self._targets}
        self._counters: dict[int, ImmCounter] = {}
        try:
            for number in self._targets:
                self._counters[number] = fabric.counter()
        except BaseException:
            self.close()
            raise
        self._row_bytes: Ints = plan.piece_bytes[plan.row_piece[rows]]
        self.total_bytes: int = int(self._row_bytes.sum())
        shared_out = copy.device.checks > 1 and not copy.device.queues
        self._trip_bytes = TRIP_BYTES if shared_out else max(1, self.total_bytes)
        self._reported = Reported(rows, senders, self.names)
        self._doubtful: dict[ChecksumKind, dict[int, int]] = {}
        self._queue: Queue[Columns] = Queue()
        self._ahead: Queue[tuple[int, int, Columns]] = Queue()  # of whom, after which arrival
        self._coming = 0
        self._checked = 0
        self._all_reported = anyio.Event()

    def imm(self, sender: str) -> int:
        """Return the counter for what a sender writes."""
        return self._counters[self.names[sender]].imm

    @property
    def trainers(self) -> list[str]:
        """Return the senders that are trainers; the others forward."""
        return [name for name, number in self.names.items() if number < self._plan.trainers]

    @property
    def all_reported(self) -> bool:
        """Whether every row was reported as written."""
        return self._reported.all

    def close(self) -> None:
        """Close the counters; what arrives later is stale."""
        for counter in self._counters.values():
            counter.close()

    def missing(self) -> list[str]:
        """Return who has not written everything yet, for messages."""
        return [name for name, number in self.names.items() if self._counters[number].value < self._targets[number]]

    def take(self, sender: str, message: Written, *, decoded: bool = False) -> None:
        """Take the rows that a sender reports as written; rows that were decoded here no write was counted for.

        Raises RemoteProtocolError for rows that are not this sender's to write here.
        """
        self.take_all([(sender, message)], decoded=decoded)

    def take_all(self, reports: Sequence[tuple[str, Written]], *, decoded: bool = False) -> None:
        """Take what senders report together, as `take` one by one."""
        there = []
        for sender, message in reports:
            if not self._is_ahead(sender, message):
                there.append((sender, message))
                continue
            for columns in self._reported.take([(sender, message)]):
                self._coming += 1
                self._ahead.put_nowait((self.names[sender], message.after, columns))
        for columns in self._reported.take(there):
            if decoded:
                for number, writes in self.places.writes(columns.rows, self._senders[columns.at]).items():
                    self._targets[number] -= writes
            for piece in columns.cut(self._row_bytes[columns.at], self._trip_bytes):
                self._queue.put_nowait(piece)
        self._end_queues()

    def _is_ahead(self, sender: str, message: Written) -> bool:
        """Return whether what is reported is still to come."""
        number = self.names.get(sender)
        if number is None or not message.after:
            return False
        if message.after > self._targets[number]:
            raise RemoteProtocolError(f"{sender} states {message.after} writes of {self._targets[number]}")
        return message.after > self._counters[number].value

    def check(self, sender: str, version: int, rows: Ints) -> None:
        """Raise RemoteProtocolError for rows that are not this sender's to write here, or were reported before."""
        self._reported.check(sender, version, rows)

    async def run(self, verified: Verified) -> None:
        """Return when every byte has arrived and every checksum is right.

        Args:
            verified: called with what is right.

        Raises:
            BrokenError: bytes are wrong; the text names the tensor and the sender.

        Cancellation: at once; the caller takes back the keys.
        """
        self._end_queues()
        with unwrapped():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._check_all, verified)
                tasks.start_soon(self._shut)
                async for one in self._ahead:
                    tasks.start_soon(self._arrive, *one, verified)
        for kind, doubtful in self._doubtful.items():
            rows, sums = list(doubtful), list(doubtful.values())
            right = await self._right(rows, sums, kind)
            wrong = [row for row, good in zip(rows, right, strict=True) if not good]
            if wrong:
                raise BrokenError(
                    self._describe(wrong),
                    remedy="publish again, while nobody changes the weights; if it repeats, check memory and links",
                )
            await self._pass(rows, sums, kind, verified)
        if self._checked != len(self.rows):
            raise BrokenError(
                f"{len(self.rows) - self._checked} of {len(self.rows)} rows were not checked",
                remedy="this is a defect of asyncfabric; the version is not taken, please report it with this text",
            )

    def _end_queues(self) -> None:
        if self._reported.all:
            self._ahead.close()
            self._all_reported.set()
            if not self._coming:
                self._queue.close()

    async def _arrive(self, number: int, after: int, columns: Columns, verified: Verified) -> None:
        """Check rows that were reported ahead once they are there; what is hashed is made ready meanwhile."""
        rows, sums, kind = columns.rows.tolist(), columns.sums.tolist(), columns.kind
        counter = self._counters[number]
        reported = self._prepared(rows, kind) if self._queues(kind) else None
        await counter.wait(after)
        right = await self._right(rows, sums, kind, reported)
        if not all(right):  # rails may have brought others first; and who waits for these rows must not wait for all
            await counter.wait(self._targets[number])
            right = await self._right(rows, sums, kind)
        await self._judge(rows, sums, kind, right, verified)
        self._coming -= 1
        self._end_queues()

    async def _shut(self) -> None:
        """Return when all writes have arrived, and nothing can land any more: what is checked then stays as it is."""
        await self._all_reported.wait()
        for number, target in self._targets.items():  # what came decoded is not in them any more
            await self._counters[number].wait(target)
        await self.copy.close()

    async def _check_all(self, verified: Verified) -> None:
        turns = anyio.Semaphore(self.copy.device.checks)
        with unwrapped():
            async with anyio.create_task_group() as tasks:
                async for first in self._queue:
                    await turns.acquire()
                    together: dict[ChecksumKind, tuple[list[int], list[int]]] = {}
                    columns: Columns | None = first
                    left = self._trip_bytes
                    while columns is not None:
                        rows, sums = together.setdefault(columns.kind, ([], []))
                        rows.extend(columns.rows.tolist())
                        sums.extend(columns.sums.tolist())
                        left -= int(self._row_bytes[columns.at].sum())
                        columns = self._queue.next_nowait() if left > 0 else None
                    tasks.start_soon(self._check_batch, together, verified, turns)

    async def _check_batch(
        self, together: dict[ChecksumKind, tuple[list[int], list[int]]], verified: Verified, turns: anyio.Semaphore
    ) -> None:
        judged = [(rows, sums, kind, await self._right(rows, sums, kind)) for kind, (rows, sums) in together.items()]
        turns.release()
        for each in judged:
            await self._judge(*each, verified)

    async def _judge(
        self, rows: list[int], sums: list[int], kind: ChecksumKind, right: list[bool], verified: Verified
    ) -> None:
        """Pass rows on that are right; the others are looked at again in the end."""
        if all(right):
            await self._pass(rows, sums, kind, verified)
            return
        found = list(zip(rows, sums, right, strict=True))
        self._doubtful.setdefault(kind, {}).update((row, reported) for row, reported, fine in found if not fine)
        if fine := [(row, reported) for row, reported, fine in found if fine]:
            await self._pass([row for row, _ in fine], [reported for _, reported in fine], kind, verified)

    async def _pass(self, rows: list[int], sums: list[int], kind: ChecksumKind, verified: Verified) -> None:
        self._checked += len(rows)
        await verified(rows, sums, kind)

    def _queues(self, kind: ChecksumKind) -> bool:
        """Return whether the device is driven from the event loop: threads would wait for each other."""
        return self.copy.device.queues and kind == self.copy.device.checksum

    async def _right(
        self, rows: list[int], sums: list[int], kind: ChecksumKind, reported: Sums | None = None
    ) -> list[bool]:
        """Return which rows are right; `reported` works out their checksums, if that was made ready."""
        if not self._queues(kind):
            return await in_thread(lambda: compared(self._prepared(rows, kind), sums))
        found = reported or self._prepared(rows, kind)
        found.begin()
        return await compared_soon(found, sums)

    def _prepared(self, rows: list[int], kind: ChecksumKind) -> Sums:
        """Return what works out the checksums of rows, once it is begun."""
        summing = self.places.summing(self.copy, kind, self.rows)
        with nullcontext() if self._queues(kind) else self.copy.device.working():
            return summing(np.searchsorted(self.rows, rows).tolist())

    def _describe(self, wrong: list[int]) -> str:
        row = wrong[0]
        place = int(np.searchsorted(self.rows, row))
        sender = next(name for name, number in self.names.items() if number == self._senders[place])
        region = self._plan.regions[int(self._plan.move_region[self._plan.row_move[row]])]
        begin, _ = self.places.places(row)
        return (
            f"{len(wrong)} of {len(self.rows)} rows have wrong bytes, the first is row {row} of {sender}: "
            f"{self.places.shape(row).nbytes} bytes of {region}, at byte {begin} of this receiver's memory"
        )
