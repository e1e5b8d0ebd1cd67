"""A plan as work for the simulation: what each trainer brings in which order, and what each unit sends where. Pure.

Rows of a sender, in its real order, are grouped into units of about `unit_bytes` of its shard. Small writes are
counted as long as the time for which they keep the rail busy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncfabric.sim.assumptions import Assumptions
from asyncfabric.weights.plan.batch import Batch, all_sent
from asyncfabric.weights.plan.boxes import Ints, volumes
from asyncfabric.weights.plan.formats import ITEM_BYTES
from asyncfabric.weights.plan.plan import Plan

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Workload:
    """Receivers of all replicas are numbered through: replica index x receivers of one + receiver. Bytes throughout.

    Attributes:
        brought: (trainers, units): bytes of the shard brought up to the end of each unit; later units repeat the total.
        converted: the same of converted weights: the scratch that they take until all their copies are written.
        first_entry: (trainers, units + 1): entries of a unit are those from here to the next number.
        entry_receiver, entry_bytes: columns: what a unit puts on the rail, to whom.
        written: (trainers,): bytes on the rail in all.
        fed: (receivers of all replicas,): bytes on the rail from trainers or from the feeder.
        feeder: the receiver that feeds each, -1 when trainers do.
        team: (trainers,): trainers of one team convert side by side, see `Plan.teams`.
        forwards: bytes that each receiver passes on inside its node; gets: that it gets so.
    """

    brought: Floats
    converted: Floats
    first_entry: Ints
    entry_receiver: Ints
    entry_bytes: Floats
    written: Floats
    fed: Floats
    feeder: Ints
    team: Ints
    forwards: Floats
    gets: Floats


def workload_of(plan: Plan, assumed: Assumptions) -> Workload:
    """Return the work of a plan; raises ValueError when it has no replica."""
    if not plan.replicas:
        raise ValueError("the plan has no replica, so there is nothing to simulate")
    least = assumed.message_us * 1e-6 * assumed.rail_bytes_per_s
    pieces = plan.pieces
    scales = plan.piece_bytes - pieces.run_bytes * pieces.runs
    on_rail: Floats = np.maximum(pieces.run_bytes.astype(np.float64), least) * pieces.runs
    on_rail += np.maximum(scales.astype(np.float64), least * pieces.scale_runs)
    item = np.zeros(len(pieces), np.int64)
    for kind in plan.kinds:
        item[kind.first : kind.first + kind.count] = ITEM_BYTES[kind.dtype]
    held = volumes(pieces.size) * item
    units = [_units(batch, plan, on_rail, held, assumed) for batch in all_sent(plan)]
    most = max(len(unit.brought) for unit in units)
    entries = np.array([len(unit.receiver) for unit in units], np.int64)
    firsts = _stack([unit.first for unit in units], most + 1) + (np.cumsum(entries) - entries)[:, None]
    return Workload(
        _stack([unit.brought for unit in units], most),
        _stack([unit.converted for unit in units], most),
        firsts,
        np.concatenate([unit.receiver for unit in units]),
        np.concatenate([unit.amount for unit in units]),
        np.array([unit.amount.sum() for unit in units]),
        team=plan.teams,
        **_receiving(plan, on_rail),
    )


def _stack(rows: list[Any], length: int) -> Any:
    """Return rows of unequal lengths as a matrix, each padded with its last number."""
    return np.stack([np.pad(row, (0, length - len(row)), mode="edge") for row in rows])


@dataclass(frozen=True, eq=False)
class _Units:
    brought: Floats
    converted: Floats
    first: Ints
    receiver: Ints
    amount: Floats


def _units(batch: Batch, plan: Plan, on_rail: Floats, held: Ints, assumed: Assumptions) -> _Units:
    if not len(batch):
        none = np.zeros(0, np.int64)
        return _Units(np.zeros(1), np.zeros(1), np.zeros(2, np.int64), none, np.zeros(0))
    begins = np.flatnonzero(np.diff(batch.box, prepend=-1))
    box = np.repeat(np.arange(len(begins)), np.diff([*begins.tolist(), len(batch)]))
    source = np.cumsum(held[batch.piece[begins]]).astype(np.float64)
    unit_of_box = ((source - 1) // assumed.unit_bytes).astype(np.int64)
    unit_of_box = np.unique(unit_of_box, return_inverse=True)[1].reshape(-1)
    count = int(unit_of_box[-1]) + 1
    brought = source[np.searchsorted(unit_of_box, np.arange(count), side="right") - 1]
    everyone = len(plan.replicas) * plan.receivers
    key = unit_of_box[box] * everyone + batch.replica * plan.receivers + batch.receiver
    keys, which = np.unique(key, return_inverse=True)
    amount = np.bincount(which.reshape(-1), weights=on_rail[batch.piece], minlength=len(keys)).astype(np.float64)
    first = np.searchsorted(keys // everyone, np.arange(count + 1))
    converted = np.bincount(unit_of_box, weights=plan.piece_bytes[batch.piece[begins]], minlength=count)
    return _Units(brought, np.cumsum(converted), first, keys % everyone, amount)


def _receiving(plan: Plan, on_rail: Floats) -> dict[str, Any]:
    """Return the columns of receivers."""
    count = plan.receivers
    fed, forwards, gets = (np.zeros(len(plan.replicas) * count) for _ in range(3))
    feeder = np.full(len(fed), -1, np.int64)
    names = [one.name for one in plan.replicas]
    receiver, rail = plan.pieces.receiver[plan.row_piece], on_rail[plan.row_piece]
    plain = plan.piece_bytes[plan.row_piece]
    for number, one in enumerate(plan.replicas):
        where = slice(number * count, (number + 1) * count)
        inside = (one.senders >= plan.trainers) & (one.senders < plan.trainers + count)
        fed[where] = np.bincount(receiver[~inside], weights=rail[~inside], minlength=count)
        gets[where] = np.bincount(receiver[inside], weights=plain[inside], minlength=count)
        forwards[where] = np.bincount(one.senders[inside] - plan.trainers, weights=plain[inside], minlength=count)
        if one.parent is not None:
            feeder[where] = names.index(one.parent) * count + np.arange(count)
    return {"fed": fed, "feeder": feeder, "forwards": forwards, "gets": gets}
