"""Makes plans: geometry once for each kind of move, checked to fill each tensor, then a column for each replica. Pure.

Pieces of one move cover what a rank wants by construction (see geometry); moves that share a tensor are checked here.
Layers are laid out alike, so each distinct set of targets is checked once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from asyncfabric.weights.plan.assignment import join_replica
from asyncfabric.weights.plan.boxes import Ints, intersect, volumes
from asyncfabric.weights.plan.formats import ITEM_BYTES, SCALE_BYTES
from asyncfabric.weights.plan.geometry import Pieces, cut_pieces, join_pieces
from asyncfabric.weights.plan.parts import MoveKind, RegionSizes, Relay
from asyncfabric.weights.plan.placement import Placement
from asyncfabric.weights.plan.plan import Plan
from asyncfabric.weights.plan.relay import Rates, choose_relay
from asyncfabric.weights.plan.target import SCALE_SUFFIX, Move


def check_written_once(moves: Sequence[Move]) -> None:
    """Raise ValueError naming a tensor and a rank of a replica where moves overlap, leave a gap or disagree."""
    by_region: dict[str, list[Move]] = defaultdict(list)
    for move in moves:
        by_region[move.region].append(move)
    checked: set[tuple[bytes, ...]] = set()
    for region, parts in by_region.items():
        kinds = {(part.to, part.block) for part in parts}
        if len(kinds) > 1:
            raise ValueError(f"{region}: moves disagree about its type and blocks: {sorted(kinds)}")
        signature = tuple(part.target.digest for part in parts)
        if signature in checked:
            continue
        checked.add(signature)
        _check(region, parts)


def _check(region: str, parts: Sequence[Move]) -> None:
    ranks = np.concatenate([part.target.placement.ranks for part in parts])
    if len({part.target.origins.shape[1] for part in parts}) > 1:
        raise ValueError(f"{region}: moves disagree about its number of dimensions")
    origins = np.concatenate([part.target.origins for part in parts])
    extents = np.concatenate([part.target.extents for part in parts])
    shapes = np.concatenate([part.target.local_shapes for part in parts])
    for rank in np.unique(ranks):
        mine = np.flatnonzero(ranks == rank)
        if (shapes[mine] != shapes[mine[0]]).any():
            raise ValueError(f"{region}: moves disagree about its shape at rank {rank}: {shapes[mine].tolist()}")
        overlaps = intersect(origins[mine], extents[mine], origins[mine], extents[mine])
        if (overlaps.left != overlaps.right).any():
            raise ValueError(f"{region}: two moves write the same elements at rank {rank} of the replica")
        written, whole = int(volumes(extents[mine]).sum()), int(volumes(shapes[mine[:1]])[0])
        if written != whole:
            raise ValueError(
                f"{region}: moves write {written} of its {whole} elements at rank {rank} of the replica; the "
                "rest would keep old weights"
            )


def region_sizes(moves: Sequence[Move], regions: Mapping[str, int]) -> RegionSizes:
    """Return the bytes of every tensor at every receiver, by region, then by receiver."""
    rows: dict[tuple[int, int], int] = {}
    layouts: dict[tuple[bytes, str, int], list[tuple[int, int, int]]] = {}
    for move in moves:
        key = (move.target.digest, move.to, move.block)
        if key not in layouts:
            layouts[key] = _bytes_of(move)
        for rank, length, scales in layouts[key]:
            rows[regions[move.region], rank] = length
            if move.block:
                rows[regions[move.region + SCALE_SUFFIX], rank] = scales
    table = np.array([(region, rank, rows[region, rank]) for region, rank in sorted(rows)], np.int64).reshape(-1, 3)
    return RegionSizes(table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy())


def _bytes_of(move: Move) -> list[tuple[int, int, int]]:
    """Return (rank, bytes of the tensor, bytes of its scales)."""
    target = move.target
    lengths = volumes(target.local_shapes) * ITEM_BYTES[move.to]
    scales = np.zeros_like(lengths)
    if move.block:
        shapes = target.local_shapes.copy()
        last = list(target.axes)[-2:]
        shapes[:, last] = -(-shapes[:, last] // move.block)
        scales = volumes(shapes) * SCALE_BYTES
    return list(zip(target.placement.ranks.tolist(), lengths.tolist(), scales.tolist(), strict=True))


CHUNK_BYTES = 4 << 20
"""Pieces write about this much at most: large tensors can be shared out among senders, and pipelines flow."""


def plan_weights(
    moves: Sequence[Move],
    *,
    trainers: int,
    receivers: int,
    replicas: Sequence[str],
    relay: Relay | Rates | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Plan:
    """Return the plan that brings every parameter into every replica.

    Args:
        moves: what goes where. Placements and targets that are equal are best the same objects.
        trainers: ranks of the trainer.
        receivers: ranks of one replica; all replicas are laid out alike.
        replicas: their names, in the order of their seats.
        relay: who forwards; Rates lets the plan decide by the time that the slowest port needs; None: nobody.
        chunk_bytes: about the most that one piece writes.

    Raises:
        ValueError: a rank is out of range, a byte of a replica would be written twice or never, or blocks are cut.
    """
    if trainers < 1 or receivers < 1 or chunk_bytes < 1:
        raise ValueError(f"trainers, receivers, chunk_bytes must be 1 or more: {trainers}, {receivers}, {chunk_bytes}")
    seen: set[int] = set()  # placements are shared by thousands of moves
    for move in moves:
        if id(move.source) in seen and id(move.target) in seen:
            continue
        seen.update((id(move.source), id(move.target)))
        for what, count, placement in (
            ("trainers", trainers, move.source),
            ("receivers", receivers, move.target.placement),
        ):
            if len(placement.ranks) and int(placement.ranks.max()) >= count:
                raise ValueError(f"{move.parameter}: rank {placement.ranks.max()} is not one of {count} {what}")
    check_written_once(moves)
    plan = _geometry(moves, trainers, receivers, chunk_bytes)
    if isinstance(relay, Rates):
        relay = choose_relay(plan, relay, len(replicas))
    plan = plan.with_relay(relay or Relay())
    for name in replicas:
        plan = join_replica(plan, name)
    return plan


def _geometry(moves: Sequence[Move], trainers: int, receivers: int, chunk_bytes: int) -> Plan:
    kinds: list[MoveKind] = []
    sources: list[Placement] = []
    parts: list[Pieces] = []
    piece_groups: list[Ints] = []
    groups: dict[tuple[int, ...], int] = {}
    kind_of: dict[tuple[bytes, bytes, str, str, int], int] = {}
    source_of: dict[bytes, int] = {}
    parameters: dict[str, int] = {}
    regions: dict[str, int] = {}
    columns = np.zeros((4, len(moves)), np.int64)
    first = 0
    for number, move in enumerate(moves):
        key = (move.source.digest, move.target.digest, move.dtype, move.to, move.block)
        kind = kind_of.get(key)
        if kind is None:
            kind = kind_of[key] = len(kinds)
            source = source_of.setdefault(move.source.digest, len(sources))
            if source == len(sources):
                sources.append(move.source)
            part = cut_pieces(move, chunk_bytes)
            kinds.append(MoveKind(move.dtype, move.to, move.block, source, first, len(part)))
            numbers = [groups.setdefault(holders, len(groups)) for holders in move.source.cells.holders]
            piece_groups.append(np.array(numbers, np.int64)[part.cell])
            parts.append(part)
            first += len(part)
        scales = regions.setdefault(move.region + SCALE_SUFFIX, len(regions)) if move.block else -1
        columns[:, number] = (
            kind,
            parameters.setdefault(move.parameter, len(parameters)),
            regions.setdefault(move.region, len(regions)),
            scales,
        )
    if not moves:
        raise ValueError("there is nothing to move: the list of moves is empty")
    dims = max(2, *(len(source.shape) for source in sources))
    return Plan(
        trainers,
        receivers,
        tuple(parameters),
        tuple(regions),
        tuple(kinds),
        tuple(sources),
        join_pieces(parts, dims),
        tuple(groups),
        np.concatenate(piece_groups),
        columns[0],
        columns[1],
        columns[2],
        columns[3],
        region_sizes(moves, regions),
    )
