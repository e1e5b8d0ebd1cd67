"""The check that moves fill every tensor of a replica: each byte once, none twice, none never. Pure.

Pieces of one move cover what a rank wants by construction (see geometry); here is looked at moves that share a
tensor. Layers are laid out alike, so each distinct set of targets is checked once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from asyncfabric.weights.boxes import intersect, volumes
from asyncfabric.weights.formats import ITEM_BYTES, SCALE_BYTES
from asyncfabric.weights.plan import RegionSizes
from asyncfabric.weights.target import SCALE_SUFFIX, Move


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
