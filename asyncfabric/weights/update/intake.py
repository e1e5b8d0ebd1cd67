"""Intake: one version on its way into one receiver: counters, checksums row by row, and what is complete.

Runs on the event loop's thread; hashing runs on worker threads. A row is checked when its sender says that it is
written, while others still arrive; what is not right then is looked at again when every arrival is counted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from threading import Lock

import anyio
import numpy as np

from asyncfabric import BrokenError, Fabric, ImmCounter, RemoteProtocolError
from asyncfabric._groups import unwrapped
from asyncfabric.weights.boxes import Ints
from asyncfabric.weights.commit.checksums import ChecksumKind
from asyncfabric.weights.plan import Plan
from asyncfabric.weights.update.comparing import compared, compared_soon
from asyncfabric.weights.update.copies import Copy
from asyncfabric.weights.update.device import Memory, Stretch, Summing, Sums
from asyncfabric.weights.update.layout import layout_of
from asyncfabric.weights.update.line import Line
from asyncfabric.weights.update.messages import Written
from asyncfabric.weights.update.messenger import receiver_name, trainer_name
from asyncfabric.weights.update.rows import PieceShape, Strided, in_shard, written_run_bytes
from asyncfabric.weights.update.threads import in_thread
from asyncfabric.weights.update.told import Columns, Told

TRIP_BYTES = 8 << 20
"""One thread hashes so many at a time where several do: what is left in the end is shared out among them. A device that
queues does them one after the other whoever tells it."""

Verified = Callable[[list[int], list[int], ChecksumKind], Awaitable[None]]
"""Called with rows that are right, and their checksums, in no order."""


def sender_name(plan: Plan, replica: str, sender: int) -> str:
    """Return who a number in `Replica.senders` of this replica is."""
    if sender < plan.trainers:
        return trainer_name(sender)
    receiver = sender - plan.trainers
    if receiver < plan.receivers:
        return receiver_name(replica, receiver)
    return receiver_name(plan.replica(replica).parent or "", receiver - plan.receivers)


class RowPlaces:
    """Where rows of the plan lie in the memory of one receiver; the same for all versions of a plan."""

    def __init__(self, plan: Plan, receiver: int) -> None:
        self._plan = plan
        self._receiver = receiver
        self._awaited: dict[str, tuple[Ints, Ints, dict[int, int]]] = {}
        self._offsets = layout_of(plan, receiver).by_region
        self._shapes: dict[int, PieceShape] = {}
        self._lies: dict[int, list[tuple[Strided, int]]] = {}  # of rows that were checked
        self._summing: dict[tuple[Copy, ChecksumKind], Summing] = {}
        self._making = Lock()

    def shape(self, row: int) -> PieceShape:
        """Return how a row lies there."""
        piece = int(self._plan.row_piece[row])
        shape = self._shapes.get(piece)
        if shape is None:
            kind = self._plan.kinds[self._plan.kind_of(piece)]
            shape = self._shapes[piece] = PieceShape(self._plan.pieces, piece, kind.to)
        return shape

    def places(self, row: int) -> tuple[int, int]:
        """Return where its weights and its scales begin."""
        shape, move = self.shape(row), int(self._plan.row_move[row])
        scales = int(self._plan.move_scales[move])
        return (
            int(self._offsets[self._plan.move_region[move]]) + shape.weights_at,
            int(self._offsets[scales]) + shape.scales_at if scales >= 0 and shape.scales is not None else 0,
        )

    def run_bytes(self, row: int, sender: int) -> int:
        """Return the bytes of one write of a row's weights; `sender` as in `Replica.senders`."""
        shape, piece = self.shape(row), int(self._plan.row_piece[row])
        lies: Strided | None
        if sender < self._plan.trainers:
            lies = in_shard(self._plan, self._plan.kinds[self._plan.kind_of(piece)], sender, piece, shape.order)
        else:
            lies = self._twin((sender - self._plan.trainers) % self._plan.receivers, piece)
        return written_run_bytes(lies, shape.run_bytes)

    def awaited(self, name: str) -> tuple[Ints, Ints, dict[int, int]]:
        """Return the rows that this receiver of a replica gets, who sends each, and how many writes each makes."""
        if name not in self._awaited:
            rows = np.flatnonzero(self._plan.pieces.receiver[self._plan.row_piece] == self._receiver)
            senders = self._plan.replica(name).senders[rows].astype(np.int64)
            self._awaited[name] = (rows, senders, self.writes(rows, senders))
        rows, senders, writes = self._awaited[name]
        return rows, senders, dict(writes)

    def writes(self, rows: Ints, senders: Ints) -> dict[int, int]:
        """Return how many writes each sender makes to bring these rows."""
        found: dict[int, int] = dict.fromkeys(np.unique(senders).tolist(), 0)
        known: dict[tuple[int, int], int] = {}
        for row, sender in zip(rows.tolist(), senders.tolist(), strict=True):
            key = (int(self._plan.row_piece[row]), sender)
            if key not in known:
                shape = self.shape(row)
                known[key] = shape.weights.nbytes // self.run_bytes(row, sender) + shape.scale_runs
            found[sender] += known[key]
        return found

    def _twin(self, receiver: int, piece: int) -> Strided:
        """Return how the equal box lies at another receiver, which forwards it."""
        pieces, number = self._plan.pieces, self._plan.kind_of(piece)
        kind = self._plan.kinds[number]
        own = slice(kind.first, kind.first + kind.count)
        same = (pieces.receiver[own] == receiver) & (pieces.twin[own] == pieces.twin[piece])
        return PieceShape(pieces, kind.first + int(np.argmax(same)), kind.to).weights

    def stretches(self, memory: Memory, row: int) -> list[Stretch]:
        """Return what a checksum of the row is over: weights, and scales if there are any."""
        lies = self._lies.get(row)
        if lies is None:
            shape, (weights_at, scales_at) = self.shape(row), self.places(row)
            lies = [(shape.weights, weights_at)]
            if shape.scales is not None:
                lies.append((shape.scales, scales_at))
            self._lies[row] = lies
        return [Stretch(memory, *each) for each in lies]

    def summing(self, copy: Copy, kind: ChecksumKind, rows: Ints) -> Summing:
        """Return what works out checksums in a copy, by the place of a row in `rows`, which are the same each time.

        On any thread.
        """
        with self._making:
            found = self._summing.get((copy, kind))
            if found is None:
                all_ = [self.stretches(copy.memory, row) for row in rows.tolist()]
                found = self._summing[copy, kind] = copy.device.summing(kind, all_)
        return found


class Intake:
    """One version on its way into a copy.

    Attributes:
        rows: of the plan, that it awaits; total_bytes: of them.
        names: of the senders, and their numbers in `Replica.senders`.
    """

    def __init__(self, fabric: Fabric, plan: Plan, places: RowPlaces, name: str, copy: Copy) -> None:
        """Open the counters of a version that goes into a copy; `plan` is the one with its replicas."""
        self._plan = plan
        self._places = places
        self._copy = copy
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
        self._told = Told(rows, senders, self.names)
        self._doubtful: dict[ChecksumKind, dict[int, int]] = {}
        self._line: Line[Columns] = Line()
        self._ahead: Line[tuple[int, int, Columns]] = Line()  # of whom, after which arrival
        self._coming = 0
        self._checked = 0
        self._all_told = anyio.Event()

    def imm(self, sender: str) -> int:
        """Return the counter for what a sender writes."""
        return self._counters[self.names[sender]].imm

    @property
    def trainers(self) -> list[str]:
        """Return the senders that are trainers; the others forward."""
        return [name for name, number in self.names.items() if number < self._plan.trainers]

    @property
    def all_told(self) -> bool:
        """Whether every row was said to be written."""
        return self._told.all

    def close(self) -> None:
        """Close the counters; what arrives later is stale."""
        for counter in self._counters.values():
            counter.close()

    def missing(self) -> list[str]:
        """Return who has not written everything yet, for messages."""
        return [name for name, number in self.names.items() if self._counters[number].value < self._targets[number]]

    def take(self, sender: str, message: Written, *, decoded: bool = False) -> None:
        """Take what a sender says that it has written; rows that were decoded here no write was counted for.

        Raises RemoteProtocolError for rows that are not this sender's to write here.
        """
        self.take_all([(sender, message)], decoded=decoded)

    def take_all(self, words: Sequence[tuple[str, Written]], *, decoded: bool = False) -> None:
        """Take what senders say together, as `take` one by one."""
        there = []
        for sender, message in words:
            if not self._is_ahead(sender, message):
                there.append((sender, message))
                continue
            for columns in self._told.take([(sender, message)]):
                self._coming += 1
                self._ahead.put_nowait((self.names[sender], message.after, columns))
        for columns in self._told.take(there):
            if decoded:
                for number, writes in self._places.writes(columns.rows, self._senders[columns.at]).items():
                    self._targets[number] -= writes
            for piece in columns.cut(self._row_bytes[columns.at], self._trip_bytes):
                self._line.put_nowait(piece)
        self._end_lines()

    def _is_ahead(self, sender: str, message: Written) -> bool:
        """Return whether what is told is still to come."""
        number = self.names.get(sender)
        if number is None or not message.after:
            return False
        if message.after > self._targets[number]:
            raise RemoteProtocolError(f"{sender} says {message.after} writes of {self._targets[number]}")
        return message.after > self._counters[number].value

    def check(self, sender: str, version: int, rows: Ints) -> None:
        """Raise RemoteProtocolError for rows that are not this sender's to write here, or were told before."""
        self._told.check(sender, version, rows)

    async def run(self, verified: Verified) -> None:
        """Return when every byte has arrived and every checksum is right.

        Args:
            verified: is told what is right.

        Raises:
            BrokenError: bytes are wrong; the text names the tensor and the sender.

        Cancellation: at once; the caller takes back the keys.
        """
        self._end_lines()
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
            await self._say(rows, sums, kind, verified)
        if self._checked != len(self.rows):
            raise BrokenError(
                f"{len(self.rows) - self._checked} of {len(self.rows)} rows were not checked",
                remedy="this is a defect of asyncfabric; the version is not taken, please report it with this text",
            )

    def _end_lines(self) -> None:
        if self._told.all:
            self._ahead.close()
            self._all_told.set()
            if not self._coming:
                self._line.close()

    async def _arrive(self, number: int, after: int, columns: Columns, verified: Verified) -> None:
        """Check rows that were told ahead once they are there; what is hashed is made ready meanwhile."""
        rows, sums, kind = columns.rows.tolist(), columns.sums.tolist(), columns.kind
        counter = self._counters[number]
        told = self._told_of(rows, kind) if self._queues(kind) else None
        await counter.wait(after)
        right = await self._right(rows, sums, kind, told)
        if not all(right):  # rails may have brought others first; and who waits for these rows must not wait for all
            await counter.wait(self._targets[number])
            right = await self._right(rows, sums, kind)
        await self._judge(rows, sums, kind, right, verified)
        self._coming -= 1
        self._end_lines()

    async def _shut(self) -> None:
        """Return when all writes have arrived, and nothing can land any more: what is checked then stays as it is."""
        await self._all_told.wait()
        for number, target in self._targets.items():  # what came decoded is not in them any more
            await self._counters[number].wait(target)
        await self._copy.close()

    async def _check_all(self, verified: Verified) -> None:
        turns = anyio.Semaphore(self._copy.device.checks)
        with unwrapped():
            async with anyio.create_task_group() as tasks:
                async for first in self._line:
                    await turns.acquire()
                    together: dict[ChecksumKind, tuple[list[int], list[int]]] = {}
                    columns: Columns | None = first
                    left = self._trip_bytes
                    while columns is not None:
                        rows, sums = together.setdefault(columns.kind, ([], []))
                        rows.extend(columns.rows.tolist())
                        sums.extend(columns.sums.tolist())
                        left -= int(self._row_bytes[columns.at].sum())
                        columns = self._line.next_nowait() if left > 0 else None
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
        """Say which rows are right; the others are looked at again in the end."""
        if all(right):
            await self._say(rows, sums, kind, verified)
            return
        found = list(zip(rows, sums, right, strict=True))
        self._doubtful.setdefault(kind, {}).update((row, told) for row, told, fine in found if not fine)
        if fine := [(row, told) for row, told, fine in found if fine]:
            await self._say([row for row, _ in fine], [told for _, told in fine], kind, verified)

    async def _say(self, rows: list[int], sums: list[int], kind: ChecksumKind, verified: Verified) -> None:
        self._checked += len(rows)
        await verified(rows, sums, kind)

    def _queues(self, kind: ChecksumKind) -> bool:
        """Return whether the device is told from the event loop: threads would wait for each other."""
        return self._copy.device.queues and kind == self._copy.device.checksum

    async def _right(
        self, rows: list[int], sums: list[int], kind: ChecksumKind, told: Sums | None = None
    ) -> list[bool]:  # fmt: skip
        """Return which rows are right; `told` works out their checksums, if that was made ready."""
        if not self._queues(kind):
            return await in_thread(lambda: compared(self._told_of(rows, kind), sums))
        found = told or self._told_of(rows, kind)
        found.begin()
        return await compared_soon(found, sums)

    def _told_of(self, rows: list[int], kind: ChecksumKind) -> Sums:
        """Return what works out the checksums of rows, once it is begun."""
        summing = self._places.summing(self._copy, kind, self.rows)
        with nullcontext() if self._queues(kind) else self._copy.device.working():
            return summing(np.searchsorted(self.rows, rows).tolist())

    def _describe(self, wrong: list[int]) -> str:
        row = wrong[0]
        place = int(np.searchsorted(self.rows, row))
        sender = next(name for name, number in self.names.items() if number == self._senders[place])
        region = self._plan.regions[int(self._plan.move_region[self._plan.row_move[row]])]
        begin, _ = self._places.places(row)
        return (
            f"{len(wrong)} of {len(self.rows)} rows have wrong bytes, the first is row {row} of {sender}: "
            f"{self._places.shape(row).nbytes} bytes of {region}, at byte {begin} of this receiver's memory"
        )
