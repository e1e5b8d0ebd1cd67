"""Plans as bytes, and the hash that all sides compare before the first byte is written. Pure; msgspec, no pickle.

The bytes of equal plans are equal, in every process and on every machine: columns are little-endian and nothing
depends on the order of a set or on an address.
"""

from __future__ import annotations

from dataclasses import fields
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncfabric.weights.geometry import Pieces
from asyncfabric.weights.placement import Placement
from asyncfabric.weights.plan import Kind, Plan, RegionSizes, Relay, Replica

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
    kinds: list[Kind]
    sources: list[StoredPlacement]
    pieces: list[StoredColumn]
    groups: list[tuple[int, ...]]
    columns: list[StoredColumn]
    sizes: list[StoredColumn]
    relay: Relay
    replicas: list[StoredReplica]


def to_bytes(plan: Plan) -> bytes:
    """Return the plan as MessagePack."""
    stored = StoredPlan(
        VERSION, plan.trainers, plan.receivers, list(plan.parameters), list(plan.regions), list(plan.kinds),
        [StoredPlacement(one.shape, _store(one.ranks), _store(one.starts), _store(one.sizes)) for one in plan.sources],
        [_store(getattr(plan.pieces, field.name)) for field in fields(Pieces)],
        list(plan.groups), [_store(getattr(plan, name)) for name in COLUMNS], [_store(each) for each in plan.sizes],
        plan.relay, [StoredReplica(one.name, one.seat, one.parent, _store(one.senders)) for one in plan.replicas],
    )  # fmt: skip
    return msgspec.msgpack.encode(stored)


def from_bytes(data: bytes) -> Plan:
    """Return the plan that `to_bytes` stored.

    Raises:
        ValueError: the bytes are no plan, one of another version, or one whose columns do not fit together.
    """
    try:
        stored = msgspec.msgpack.decode(data, type=StoredPlan)
    except msgspec.DecodeError as error:
        raise ValueError(f"these {len(data)} bytes are no plan: {error}") from None
    if stored.version != VERSION:
        raise ValueError(f"the plan is of version {stored.version}, this program reads {VERSION}")
    names = [field.name for field in fields(Pieces)]
    if len(stored.pieces) != len(names) or len(stored.columns) != len(COLUMNS) or len(stored.sizes) != 3:
        raise ValueError("the plan has columns too many or too few")
    pieces = Pieces(**{name: _load(column) for name, column in zip(names, stored.pieces, strict=True)})
    columns = {name: _load(column) for name, column in zip(COLUMNS, stored.columns, strict=True)}
    plan = Plan(
        stored.trainers, stored.receivers, tuple(stored.parameters), tuple(stored.regions), tuple(stored.kinds),
        tuple(Placement(one.shape, _load(one.ranks), _load(one.starts), _load(one.sizes)) for one in stored.sources),
        pieces, tuple(stored.groups), **columns,
        sizes=RegionSizes(*[_load(column) for column in stored.sizes]), relay=stored.relay,
        replicas=tuple(Replica(one.name, one.seat, one.parent, _load(one.senders)) for one in stored.replicas),
    )  # fmt: skip
    _check(plan)
    return plan


def digest(plan: Plan) -> str:
    """Return the hash of a plan, 32 hexadecimal digits."""
    return blake2b(to_bytes(plan), digest_size=16).hexdigest()


def _store(array: NDArray[Any]) -> StoredColumn:
    dtype = "<i4" if array.dtype.itemsize == 4 else "<i8"
    return StoredColumn(array.shape, dtype, np.ascontiguousarray(array, dtype).tobytes())


def _load(column: StoredColumn) -> Any:
    if column.dtype not in ("<i4", "<i8"):
        raise ValueError(f"a column has type {column.dtype!r}, expected <i4 or <i8")
    try:
        return np.frombuffer(column.data, column.dtype).reshape(column.shape)
    except ValueError as error:
        raise ValueError(f"a column of {len(column.data)} bytes does not have shape {column.shape}: {error}") from None


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
