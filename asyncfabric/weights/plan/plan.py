"""The plan: for each replica which rank writes which piece where. Columns of numbers, and the ways to read them.

Pure values, made by `planner`. A row is (move, piece of its kind); rows are numbered move by move and are the same for
every replica. All that a replica adds is one column: the sender of each row. So replicas do not depend on each other,
unless one is fed by another (`Replica.parent`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from hashlib import blake2b
from math import prod
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncfabric.unreadable import UNREADABLE
from asyncfabric.weights.plan.boxes import Families, Ints, families
from asyncfabric.weights.plan.formats import ITEM_BYTES, SCALE_BYTES
from asyncfabric.weights.plan.geometry import Pieces
from asyncfabric.weights.plan.parts import (
    COLUMNS,
    NO_RELAY,
    VERSION,
    Expected,
    MoveKind,
    RegionSizes,
    Relay,
    Replica,
    StoredPlacement,
    StoredPlan,
    StoredReplica,
    loaded,
    stored_as,
)
from asyncfabric.weights.plan.placement import Placement, teams

SHARED = frozenset({"row_first", "row_move", "row_piece", "piece_bytes", "model_bytes", "families", "teams"})
"""What a plan works out from its geometry once, for all plans of that geometry."""


@dataclass(frozen=True, eq=False)
class Plan:
    """How all weights go from all trainers into all replicas. Columns must not be changed.

    Attributes:
        trainers: ranks of the trainer are 0 .. trainers - 1.
        receivers: ranks of one replica.
        parameters, regions: names at the trainers and at the replicas.
        kinds, sources, pieces: the geometry, see there.
        groups: for each distinct set of trainers that hold the same, its ranks; piece_group: the group of each piece.
        move_kind, move_parameter, move_region, move_scales: what each move is; move_scales is -1 without scales.
        sizes: bytes of each tensor of a replica.
        relay: who forwards.
        replicas: in the order of their seats.
    """

    trainers: int
    receivers: int
    parameters: tuple[str, ...]
    regions: tuple[str, ...]
    kinds: tuple[MoveKind, ...]
    sources: tuple[Placement, ...]
    pieces: Pieces
    groups: tuple[tuple[int, ...], ...]
    piece_group: Ints
    move_kind: Ints
    move_parameter: Ints
    move_region: Ints
    move_scales: Ints
    sizes: RegionSizes
    relay: Relay = NO_RELAY
    replicas: tuple[Replica, ...] = ()

    @cached_property
    def row_first(self) -> Ints:
        """The first row of each move, and the number of rows at the end."""
        counts = np.array([kind.count for kind in self.kinds], np.int64)[self.move_kind]
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    @property
    def rows(self) -> int:
        """How many rows each replica has."""
        return int(self.row_first[-1])

    @cached_property
    def row_move(self) -> NDArray[np.int32]:
        """The move of each row."""
        return np.repeat(np.arange(len(self.move_kind), dtype=np.int32), np.diff(self.row_first))

    @cached_property
    def row_piece(self) -> NDArray[np.int32]:
        """The piece of each row."""
        firsts = np.array([kind.first for kind in self.kinds], np.int64)[self.move_kind]
        shift = np.repeat(firsts - self.row_first[:-1], np.diff(self.row_first))
        return (np.arange(self.rows, dtype=np.int64) + shift).astype(np.int32)

    @cached_property
    def piece_bytes(self) -> Ints:
        """What each piece writes, scales included."""
        return self.pieces.write_bytes

    @cached_property
    def families(self) -> Families:
        """Which receivers of a node want equal bytes, by `relay.node_ranks`."""
        kind = np.repeat(np.arange(len(self.kinds)), [one.count for one in self.kinds])
        return families(kind, self.pieces.twin, self.pieces.receiver, max(1, self.relay.node_ranks))

    @cached_property
    def teams(self) -> Ints:
        """For each trainer the least rank of those with which it shares quantisation blocks, or itself."""
        numbers = sorted({kind.source for kind in self.kinds if kind.block})
        return teams([self.sources[number] for number in numbers], self.trainers)

    @cached_property
    def model_bytes(self) -> int:
        """Bytes of one copy of all parameters as a replica stores them, scales included."""
        each = []
        for kind in self.kinds:
            shape = self.sources[kind.source].shape
            length = prod(shape) * ITEM_BYTES[kind.to]
            if kind.block:
                length += prod(shape[:-2]) * prod(-(-side // kind.block) for side in shape[-2:]) * SCALE_BYTES
            each.append(length)
        return int(np.array(each, np.int64)[self.move_kind].sum())

    @cached_property
    def digest(self) -> str:
        """A hash that is the same in every process that makes or loads this plan."""
        return blake2b(to_bytes(self), digest_size=16).hexdigest()

    def kind_of(self, piece: int) -> int:
        """Return the kind that a piece belongs to."""
        return int(np.searchsorted([kind.first for kind in self.kinds], piece, side="right")) - 1

    def replica(self, name: str) -> Replica:
        """Return a replica; raises ValueError naming those that are there."""
        for one in self.replicas:
            if one.name == name:
                return one
        raise ValueError(f"the plan has no replica {name!r}, it has {[one.name for one in self.replicas]}")

    def with_replicas(self, replicas: Sequence[Replica]) -> Plan:
        """Return the plan with other replicas; the geometry is shared, not copied."""
        return self._with(SHARED, replicas=tuple(replicas))

    def with_relay(self, relay: Relay) -> Plan:
        """Return the plan without replicas, to be filled with those of another way of forwarding."""
        return self._with(SHARED - {"families"}, relay=relay, replicas=())

    def _with(self, shared: frozenset[str], **changes: Any) -> Plan:
        """Return a changed plan that keeps what was worked out from columns that did not change."""
        plan = replace(self, **changes)
        plan.__dict__.update({name: self.__dict__[name] for name in shared if name in self.__dict__})
        return plan

    def expected(self, name: str, receiver: int) -> Expected:
        """Return what a receiver of a replica waits for. One write is one contiguous run of weights or of scales."""
        rows = np.flatnonzero(self.pieces.receiver[self.row_piece] == receiver)
        pieces = self.row_piece[rows]
        senders, which = np.unique(self.replica(name).senders[rows], return_inverse=True)
        writes = (self.pieces.runs + self.pieces.scale_runs)[pieces]
        return Expected(
            senders.astype(np.int64),
            np.bincount(which, weights=writes, minlength=len(senders)).astype(np.int64),
            np.bincount(which, weights=self.piece_bytes[pieces], minlength=len(senders)).astype(np.int64),
        )

    def region_bytes(self, receiver: int) -> dict[str, int]:
        """Return the tensors of one receiver by name, with their bytes."""
        mine = self.sizes.receiver == receiver
        return {
            self.regions[region]: int(length)
            for region, length in zip(self.sizes.region[mine], self.sizes.length_bytes[mine], strict=True)
        }

    def bytes_sent(self) -> Ints:
        """Return what each trainer sends to all replicas, in bytes; what receivers forward is not in it."""
        total = np.zeros(self.trainers, np.int64)
        for one in self.replicas:
            ours = one.senders < self.trainers
            weights = self.piece_bytes[self.row_piece[ours]]
            total += np.bincount(one.senders[ours], weights=weights, minlength=self.trainers).astype(np.int64)
        return total

    def bytes_received(self, name: str) -> tuple[Ints, Ints]:
        """Return for each receiver of a replica (bytes over the network, bytes from its own node)."""
        senders = self.replica(name).senders
        inside = (senders >= self.trainers) & (senders < self.trainers + self.receivers)
        who, weights = self.pieces.receiver[self.row_piece], self.piece_bytes[self.row_piece]
        outer, inner = (
            np.bincount(who[mask], weights=weights[mask], minlength=self.receivers).astype(np.int64)
            for mask in (~inside, inside)
        )
        return outer, inner


def to_bytes(plan: Plan) -> bytes:
    """Return the plan as MessagePack."""
    stored = StoredPlan(
        VERSION,
        plan.trainers,
        plan.receivers,
        list(plan.parameters),
        list(plan.regions),
        list(plan.kinds),
        [StoredPlacement(one.shape, *map(stored_as, (one.ranks, one.starts, one.sizes))) for one in plan.sources],
        [stored_as(getattr(plan.pieces, field.name)) for field in fields(Pieces)],
        list(plan.groups),
        [stored_as(getattr(plan, name)) for name in COLUMNS],
        list(map(stored_as, plan.sizes)),
        plan.relay,
        [StoredReplica(one.name, one.seat, one.parent, stored_as(one.senders)) for one in plan.replicas],
    )
    return msgspec.msgpack.encode(stored)


def from_bytes(data: bytes) -> Plan:
    """Return the plan that `to_bytes` stored.

    Raises:
        ValueError: the bytes are no plan, one of another version, or one whose columns do not fit together.
    """
    try:
        stored = msgspec.msgpack.decode(data, type=StoredPlan)
    except UNREADABLE as error:
        raise ValueError(f"these {len(data)} bytes are no plan: {error}") from None
    if stored.version != VERSION:
        raise ValueError(f"the plan is of version {stored.version}, this program reads {VERSION}")
    names = [field.name for field in fields(Pieces)]
    if len(stored.pieces) != len(names) or len(stored.columns) != len(COLUMNS) or len(stored.sizes) != 3:
        raise ValueError("the plan has columns too many or too few")
    pieces = Pieces(**{name: loaded(column) for name, column in zip(names, stored.pieces, strict=True)})
    columns = {name: loaded(column) for name, column in zip(COLUMNS, stored.columns, strict=True)}
    plan = Plan(
        stored.trainers,
        stored.receivers,
        tuple(stored.parameters),
        tuple(stored.regions),
        tuple(stored.kinds),
        tuple(Placement(one.shape, loaded(one.ranks), loaded(one.starts), loaded(one.sizes)) for one in stored.sources),
        pieces,
        tuple(stored.groups),
        **columns,
        sizes=RegionSizes(*[loaded(column) for column in stored.sizes]),
        relay=stored.relay,
        replicas=tuple(Replica(one.name, one.seat, one.parent, loaded(one.senders)) for one in stored.replicas),
    )
    _check(plan)
    return plan


def _check(plan: Plan) -> None:
    """Raise ValueError for numbers that would lead an executor out of its columns."""
    count = len(plan.pieces)
    ranges: list[tuple[str, Any, int]] = [
        ("kinds", plan.move_kind, len(plan.kinds)),
        ("parameters", plan.move_parameter, len(plan.parameters)),
        ("regions", plan.move_region, len(plan.regions)),
        ("scales", plan.move_scales + 1, len(plan.regions) + 1),
        ("groups", plan.piece_group, len(plan.groups)),
        ("receivers", plan.pieces.receiver, plan.receivers),
    ]
    ranges += [(f"senders of {one.name}", one.senders, plan.trainers + 2 * plan.receivers) for one in plan.replicas]
    for what, column, bound in ranges:
        if len(column) and (int(column.min()) < 0 or int(column.max()) >= bound):
            raise ValueError(f"{what}: numbers must be in 0..{bound - 1}, got {column.min()}..{column.max()}")
    if any(kind.first < 0 or kind.count < 0 or kind.first + kind.count > count for kind in plan.kinds):
        raise ValueError("a kind names pieces that are not there")
    if any(not 0 <= kind.source < len(plan.sources) for kind in plan.kinds):
        raise ValueError("a kind names a placement that is not there")
    lengths = {len(getattr(plan.pieces, field.name)) for field in fields(Pieces)} | {len(plan.piece_group)}
    if lengths != {count}:
        raise ValueError("columns of pieces differ in length")
    if any(len(one.senders) != plan.rows for one in plan.replicas):
        raise ValueError(f"a replica needs one sender for each of {plan.rows} rows")
