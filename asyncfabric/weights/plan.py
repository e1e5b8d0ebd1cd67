"""The plan: for each replica which rank writes which piece where. Columns of numbers, and the ways to read them.

Pure values, made by `planner`, stored by `storage`. A row is (move, piece of its kind); rows are numbered move by
move and are the same for every replica. All that a replica adds is one column: who sends each row. So replicas do not
depend on each other, unless one is fed by another (`Replica.parent`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncfabric.weights.boxes import Ints
from asyncfabric.weights.families import Families, families
from asyncfabric.weights.formats import ITEM_BYTES, SCALE_BYTES
from asyncfabric.weights.geometry import Pieces
from asyncfabric.weights.maxima import teams
from asyncfabric.weights.placement import Placement


class Kind(msgspec.Struct, frozen=True, array_like=True):
    """What moves have in common that differ in names only.

    Attributes:
        dtype, to, block: conversion, see Move.
        source: index of the placement at the trainers.
        first, count: its pieces.
    """

    dtype: str
    to: str
    block: int
    source: int
    first: int
    count: int


class Relay(msgspec.Struct, frozen=True, array_like=True):
    """Who forwards what it has received; both 0: nobody, each byte comes from a trainer.

    Attributes:
        node_ranks: ranks of a replica that share a node: what several of them want comes over the network to one of
            them, which forwards it inside the node.
        width: replicas that trainers feed; each further one is fed by the replica `width` seats before it. 0: all.
    """

    node_ranks: int = 0
    width: int = 0


class RegionSizes(NamedTuple):
    """Columns: bytes of each tensor at each receiver of a replica, in bytes; scales have tensors of their own."""

    region: Ints
    receiver: Ints
    length_bytes: Ints


@dataclass(frozen=True, eq=False)
class Replica:
    """One replica and who sends it each row.

    Attributes:
        name: what the planner calls it.
        seat: its number of arrival, kept while others come and go; turns the choice among equal senders.
        parent: the replica that feeds it, None when trainers do.
        senders: int32 (rows,): a trainer's rank; from `Plan.trainers` on: the receiver of this replica that forwards;
            from `Plan.trainers + Plan.receivers` on: the receiver of the parent that does.
    """

    name: str
    seat: int
    parent: str | None
    senders: NDArray[np.int32]


class Expected(NamedTuple):
    """What one receiver gets: from each sender (numbers as in Replica.senders) so many writes and bytes."""

    senders: Ints
    writes: Ints
    length_bytes: Ints


NO_RELAY = Relay()

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
    kinds: tuple[Kind, ...]
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
        from asyncfabric.weights.storage import digest

        return digest(self)

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
