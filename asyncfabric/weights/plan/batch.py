"""Batches: the rows that one sender of a plan sends or forwards, in its order; and how often it reports them. Pure.

Updates report by shares, and predictions count by them. A report costs two event loops a tenth of a millisecond or
more; a row that is not reported is not checked yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from asyncfabric.weights.plan.boxes import Ints
from asyncfabric.weights.plan.plan import Plan

GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, spread any number of teams evenly."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows that one trainer writes, in order; columns of equal length. Boxes in elements, all else in bytes.

    Attributes:
        rank: the trainer.
        box: rows with equal numbers have the same box of the same parameter and the same conversion; ascending.
        replica: index into `Plan.replicas`.
        receiver: rank within that replica.
        kind, parameter, region, scales: indices into `Plan.kinds`, `.parameters`, `.regions`; scales is -1 for none.
        piece: index into `Plan.pieces`, which has offsets, strides and sizes.
        local_start: (rows, dimensions): where the box begins in this trainer's shard.
        local_shape: (rows, dimensions): the shape of that shard, with leading dimensions of 1.
        row: number of the row in the plan, the same for every replica.
    """

    rank: int
    box: Ints
    replica: Ints
    receiver: Ints
    kind: Ints
    parameter: Ints
    region: Ints
    scales: Ints
    piece: Ints
    local_start: Ints
    local_shape: Ints
    row: Ints

    def __len__(self) -> int:
        return len(self.piece)


class Forwards(NamedTuple):
    """Rows that one receiver forwards once it has them: it copies bytes from its own tensor to the same one elsewhere.

    Columns: replica (index) and receiver to write to, the region, the pieces whose place in the two tensors it is, and
    the rows of the plan that bring it here and there.
    """

    replica: Ints
    receiver: Ints
    region: Ints
    scales: Ints
    from_piece: Ints
    to_piece: Ints
    from_row: Ints
    to_row: Ints


def sent_by(plan: Plan, rank: int) -> Batch:
    """Return what a trainer writes, to all replicas.

    Raises:
        ValueError: there is no such trainer.
    """
    if not 0 <= rank < plan.trainers:
        raise ValueError(f"rank must be in 0..{plan.trainers - 1}, got {rank}")
    return _batch(plan, rank, [np.flatnonzero(one.senders == rank) for one in plan.replicas])


def all_sent(plan: Plan) -> Iterator[Batch]:
    """Yield what each trainer writes, by rank: faster than asking for one after the other."""
    orders, bounds = [], []
    ranks = np.arange(plan.trainers + 1)
    for one in plan.replicas:
        order = np.argsort(one.senders.astype(np.min_scalar_type(int(one.senders.max(initial=0)))), kind="stable")
        orders.append(order)
        bounds.append(np.searchsorted(one.senders[order], ranks))
    for rank in range(plan.trainers):
        yield _batch(plan, rank, [order[at[rank] : at[rank + 1]] for order, at in zip(orders, bounds, strict=True)])


def _batch(plan: Plan, rank: int, found: list[Ints]) -> Batch:
    rows = np.concatenate(found) if found else np.zeros(0, np.int64)
    replica = np.repeat(np.arange(len(found)), [len(each) for each in found])
    move, piece = plan.row_move[rows].astype(np.int64), plan.row_piece[rows].astype(np.int64)
    first = int(plan.teams[rank] * GOLDEN % 1.0 * len(plan.move_kind))
    turned = (move - first) % len(plan.move_kind)
    width = int(plan.pieces.twin.max(initial=0)) + 1
    _, box = np.unique(turned * width + plan.pieces.twin[piece], return_inverse=True)
    box = box.reshape(-1)
    turn = (replica + rank) % max(1, len(plan.replicas))
    order = np.lexsort((rows, turn, box))
    move, piece = move[order], piece[order]
    kind = plan.move_kind[move]
    start, shape = _shards(plan, kind, rank)
    return Batch(
        rank,
        box[order],
        replica[order],
        plan.pieces.receiver[piece],
        kind,
        plan.move_parameter[move],
        plan.move_region[move],
        plan.move_scales[move],
        piece,
        plan.pieces.start[piece] - start,
        shape,
        rows[order].astype(np.int64),
    )


def forwarded_by(plan: Plan, name: str, receiver: int) -> Forwards:
    """Return what a receiver of a replica passes on: inside its node, and to the replicas that it feeds."""
    mine = plan.replica(name)
    rows, replicas = [], []
    for number, one in enumerate(plan.replicas):
        if one is mine:
            rows.append(np.flatnonzero(one.senders == plan.trainers + receiver))
        elif one.parent == name:
            rows.append(np.flatnonzero(one.senders == plan.trainers + plan.receivers + receiver))
        else:
            continue
        replicas.append(np.full(len(rows[-1]), number, np.int64))
    row = np.concatenate(rows)
    move, piece = plan.row_move[row].astype(np.int64), plan.row_piece[row].astype(np.int64)
    here = _piece_at(plan, plan.move_kind[move], piece, receiver)
    firsts = np.array([one.first for one in plan.kinds], np.int64)[plan.move_kind[move]]
    return Forwards(
        np.concatenate(replicas),
        plan.pieces.receiver[piece],
        plan.move_region[move],
        plan.move_scales[move],
        here,
        piece,
        plan.row_first[move] + here - firsts,
        row.astype(np.int64),
    )


def _piece_at(plan: Plan, kind: Ints, piece: Ints, receiver: int) -> Ints:
    """Return the pieces of the same kinds and boxes that a receiver gets itself."""
    here = np.flatnonzero(plan.pieces.receiver == receiver)
    firsts = np.array([one.first for one in plan.kinds], np.int64)
    kind_here = np.searchsorted(firsts, here, side="right") - 1
    width = int(plan.pieces.twin.max(initial=0)) + 1
    keys = kind_here * width + plan.pieces.twin[here]
    order = np.argsort(keys, kind="stable")
    wanted = kind * width + plan.pieces.twin[piece]
    return np.asarray(here[order[np.searchsorted(keys[order], wanted)]]) if len(wanted) else np.zeros(0, np.int64)


def _shards(plan: Plan, kind: Ints, rank: int) -> tuple[Ints, Ints]:
    """Return start and shape of the shard that a trainer has of each row's parameter."""
    dims = plan.pieces.start.shape[1]
    starts = np.zeros((len(plan.kinds), dims), np.int64)
    shapes = np.ones((len(plan.kinds), dims), np.int64)
    for number in np.unique(kind):
        placement = plan.sources[plan.kinds[number].source]
        row = placement.row_of(rank)
        own = dims - len(placement.shape)
        starts[number, own:] = placement.starts[row]
        shapes[number, own:] = placement.sizes[row]
    return starts[kind], shapes[kind]


SHARES = 512
"""A receiver asks for reports worth this part of all that it awaits: they then cost its event loop some 50 ms, whoever
sends, and what is still to be checked at the end is little."""

LEAST_PART = 8
"""Towards the end reports are worth less, down to this part of a share, so that the last checks are short."""

GOLDEN_BITS = 0x9E3779B1
"""Its multiples, modulo 2^32, are spread evenly, as many as there are."""


def begin_of(number: int) -> float:
    """Return the part of a share at which the first report is due, by a number in which a receiver's senders differ."""
    return ((number + 1) * GOLDEN_BITS & 0xFFFFFFFF) / (1 << 32)


class ReportShare:
    """When what one sender has written for one receiver is worth a report.

    It is worth one when it makes up a share; or at least a part of one, and half of what was not reported.
    """

    __slots__ = ("_coming", "_least", "_share", "_unreported", "_worth")

    def __init__(self, coming_bytes: int, share_bytes: int, begin: float = 1.0) -> None:
        """Look forward to so many bytes.

        Args:
            coming_bytes: of everything for this receiver.
            share_bytes: as it asked for; 0: it wants a report of each unit.
            begin: part of a share that is worth the first report; senders that begin at different ones report in turn.
        """
        self._coming = coming_bytes
        self._share = share_bytes
        self._least = share_bytes // LEAST_PART
        self._worth = share_bytes * begin
        self._unreported = 0

    def add(self, written_bytes: int) -> bool:
        """Note what was written; return whether a report is due, which then is sent."""
        self._coming -= written_bytes
        self._unreported += written_bytes
        if self._unreported < self._worth and self._unreported < max(self._least, self._coming):
            return False
        self.reported()
        self._worth = self._share
        return True

    def reported(self) -> None:
        """A report was sent, due or not."""
        self._unreported = 0
