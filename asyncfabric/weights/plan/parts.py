"""Parts of a plan as values: kinds, replicas, sizes of tensors; and the stored forms of them and of the whole plan.

Pure. The bytes of equal plans are equal, in every process and on every machine: columns are little-endian and nothing
depends on the order of a set or on an address.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncfabric.unreadable import UNREADABLE
from asyncfabric.weights.plan.boxes import Ints


class MoveKind(msgspec.Struct, frozen=True, array_like=True):
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

VERSION = 1

COLUMNS = ("piece_group", "move_kind", "move_parameter", "move_region", "move_scales")


class StoredColumn(msgspec.Struct, frozen=True, array_like=True):
    """An array: its shape, its type (`<i8` or `<i4`) and its elements."""

    shape: tuple[int, ...]
    dtype: str
    data: bytes


class StoredPlacement(msgspec.Struct, frozen=True, array_like=True):
    """A placement: shape, ranks, starts, sizes."""

    shape: tuple[int, ...]
    ranks: StoredColumn
    starts: StoredColumn
    sizes: StoredColumn


class StoredReplica(msgspec.Struct, frozen=True, array_like=True):
    """A replica: name, seat, parent, senders."""

    name: str
    seat: int
    parent: str | None
    senders: StoredColumn


class StoredPlan(msgspec.Struct, frozen=True, array_like=True):
    """A plan, as it is stored and sent."""

    version: int
    trainers: int
    receivers: int
    parameters: list[str]
    regions: list[str]
    kinds: list[MoveKind]
    sources: list[StoredPlacement]
    pieces: list[StoredColumn]
    groups: list[tuple[int, ...]]
    columns: list[StoredColumn]
    sizes: list[StoredColumn]
    relay: Relay
    replicas: list[StoredReplica]


def stored_as(array: NDArray[Any]) -> StoredColumn:
    """Return the stored form of a column."""
    dtype = "<i4" if array.dtype.itemsize == 4 else "<i8"
    return StoredColumn(array.shape, dtype, np.ascontiguousarray(array, dtype).tobytes())


def loaded(column: StoredColumn) -> Any:
    """Return the column of a stored form; raises ValueError for one that is damaged."""
    if column.dtype not in ("<i4", "<i8"):
        raise ValueError(f"a column has type {column.dtype!r}, expected <i4 or <i8")
    try:
        return np.frombuffer(column.data, column.dtype).reshape(column.shape)
    except UNREADABLE as error:
        raise ValueError(f"a column of {len(column.data)} bytes does not have shape {column.shape}: {error}") from None
