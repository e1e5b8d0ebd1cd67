"""Awaited rows: where the rows of one receiver lie, the sender of each, and which of them were reported as written.

Runs on the event loop's thread. Rows that many senders report together are looked up once for all, in arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from threading import Lock
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from asyncfabric import RemoteProtocolError
from asyncfabric.weights.channel import receiver_name, trainer_name
from asyncfabric.weights.memory.checksums import ChecksumKind
from asyncfabric.weights.memory.device import Memory, Stretch, Summing
from asyncfabric.weights.memory.rows import PieceShape, Strided, TensorLayout, in_shard, layout_of, written_run_bytes
from asyncfabric.weights.messages import Written
from asyncfabric.weights.plan.boxes import Ints
from asyncfabric.weights.plan.plan import Plan
from asyncfabric.weights.receiver.copies import Copy


class Columns(NamedTuple):
    """Rows, their checksums, and which of the receiver's rows they are."""

    rows: Ints
    sums: NDArray[np.uint64]
    at: Ints
    kind: ChecksumKind

    def cut(self, row_bytes: Ints, most_bytes: int) -> Iterator[Columns]:
        """Yield them in order, whole rows, in pieces of less than `most_bytes` besides the first row of each.

        `row_bytes` is of each row.
        """
        numbers = (np.cumsum(row_bytes) - 1) // most_bytes
        begins = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(self.rows)]
        for low, high in pairwise(begins):
            if low != high:
                part = slice(low, high)
                yield Columns(self.rows[part], self.sums[part], self.at[part], self.kind)


class Reported:
    """The reported rows of one version.

    Attributes:
        all: whether that is everything.
    """

    def __init__(self, rows: Ints, senders: Ints, names: Mapping[str, int]) -> None:
        """Await these rows, in ascending order; `senders` has the number of each one's, `names` those of the names."""
        self._rows = rows
        self._senders = senders
        self._names = names
        self._reported = np.zeros(len(rows), bool)
        self.all: bool = not len(rows)

    def take(self, reports: Sequence[tuple[str, Written]]) -> Iterator[Columns]:
        """Note rows that were reported together; yields them by the kind of its checksums.

        Raises RemoteProtocolError for rows that are not their sender's to write here, or that were reported before; the
        rest of what came with them is not noted then, the version is over.
        """
        by_kind: dict[ChecksumKind, list[tuple[str, Written]]] = {}
        for sender, message in reports:
            if len(message.rows) != len(message.sums) or len(message.rows) % 8:
                _refuse(sender, message.version)
            by_kind.setdefault(message.checksum, []).append((sender, message))
        for kind, alike in by_kind.items():
            rows = np.frombuffer(b"".join(message.rows for _, message in alike), "<i8")
            sums = np.frombuffer(b"".join(message.sums for _, message in alike), "<u8")
            lengths = [len(message.rows) // 8 for _, message in alike]
            numbers = np.repeat([self._names.get(sender, -1) for sender, _ in alike], lengths)
            at = self._found(rows, numbers)
            if at is None:
                for sender, message in alike:
                    self.check(sender, message.version, np.frombuffer(message.rows, "<i8"))
                _refuse(" and ".join(dict.fromkeys(sender for sender, _ in alike)), alike[0][1].version)
            else:
                self._note(at)
                yield Columns(rows, sums, at, kind)

    def check(self, sender: str, version: int, rows: Ints) -> None:
        """Look whether these rows are a sender's to write, without noting them.

        Raises RemoteProtocolError as `take` does.
        """
        if self._found(rows, self._names.get(sender, -1)) is None:
            _refuse(sender, version)

    def _found(self, rows: Ints, numbers: Ints | int) -> Ints | None:
        """Return where rows stand; None unless each is its sender's and comes once, now for the first time."""
        at = np.searchsorted(self._rows, rows)
        if len(at) and int(at.max()) >= len(self._rows):
            return None
        fine = (self._rows[at] == rows) & (self._senders[at] == numbers) & ~self._reported[at]
        return at if bool(fine.all()) and len(np.unique(at)) == len(at) else None

    def _note(self, at: Ints) -> None:
        self._reported[at] = True
        self.all = bool(self._reported.all())


def _refuse(sender: str, version: int) -> NoReturn:
    raise RemoteProtocolError(f"{sender} states that it wrote rows of version {version} that are not its")


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

    def __init__(self, plan: Plan, receiver: int, layout: TensorLayout | None = None) -> None:
        """Look at memory where the tensors lie as `layout` states; None: one after the other."""
        self._plan = plan
        self._receiver = receiver
        self._awaited: dict[str, tuple[Ints, Ints, dict[int, int]]] = {}
        self._offsets = (layout or layout_of(plan, receiver)).by_region
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
