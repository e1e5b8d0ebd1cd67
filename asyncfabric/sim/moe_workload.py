"""The bytes of a step, worked out by the exchange's own routing, passes and records: what a simulation moves. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncfabric.moe.config import MoeConfig
from asyncfabric.moe.host.buffers import LaneShape
from asyncfabric.moe.host.passes import PassPlan
from asyncfabric.moe.host.routing import Experts, Ints, owner_of_expert, owners, plan_route

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LaneLoad:
    """What one lane carries in one step; matrices (ranks, ranks) from sender to receiver, zero for the own rank.

    Attributes:
        first: bytes of the write with the record and the private rows; every member of the lane gets one.
        rest: bytes of the write with the rows that private slots have no room for.
        back: bytes of the write with what goes back, from the rank that received rows to the one that sent them.
        rows: rows from each rank to each, the own rank included.
        joined: which ranks are members of one lane.
    """

    first: Floats
    rest: Floats
    back: Floats
    rows: Ints
    joined: NDArray[np.bool_]

    @property
    def writes(self) -> int:
        """Writes of a dispatch, of all ranks."""
        return int(self.joined.sum() + (self.rest > 0).sum())


def random_choices(config: MoeConfig, seed: int) -> list[Experts]:
    """Return distinct random experts for `max_tokens` tokens of each rank."""
    random = np.random.default_rng(seed)
    scores = random.random((config.ranks, config.max_tokens, config.num_experts))
    return list(np.argpartition(scores, config.top_k - 1, axis=2)[:, :, : config.top_k].astype(np.int32))


def load_of(config: MoeConfig, shapes: Sequence[LaneShape], indices: Sequence[Experts]) -> list[LaneLoad]:
    """Return the load of each lane: one among all ranks; or one across the nodes and one inside the node.

    Args:
        config: of the exchange.
        shapes: of its lanes, as `asyncfabric.moe.host.session.plan_lanes` gives them.
        indices: experts of each rank's tokens, shape [tokens, top_k].

    Raises:
        ValueError: rows have no room in one pass; what then happens is not modelled.
    """
    ranks, size = config.ranks, config.node_size
    rank_owner = owner_of_expert([config.experts_of(rank) for rank in range(ranks)], config.num_experts)
    straight = np.zeros((ranks, ranks), dtype=np.int64)
    everyone = ~np.eye(ranks, dtype=bool)
    if size == 1:
        for rank, chosen in enumerate(indices):
            straight[rank] = plan_route(owners(chosen, rank_owner), ranks).counts
        return [_lane(shapes[0], straight, everyone)]
    nodes = np.repeat(np.arange(config.nodes), size)
    node_owner = np.where(rank_owner < 0, -1, rank_owner // size)
    inside = np.zeros_like(straight)
    for rank, chosen in enumerate(indices):
        route = plan_route(owners(chosen, node_owner), config.nodes)
        straight[rank, rank % size :: size] = route.counts
        for node in range(config.nodes):
            there = node * size + rank % size  # the rank of the same place, which sends on to where the experts are
            owned = owners(chosen[route.of(node)], rank_owner) - node * size
            inside[there, node * size : (node + 1) * size] += plan_route(
                np.where((owned >= 0) & (owned < size), owned, -1), size
            ).counts
    places = np.arange(ranks) % size
    return [
        _lane(shapes[0], straight, everyone & (places[:, None] == places)),
        _lane(shapes[1], inside, everyone & (nodes[:, None] == nodes)),
    ]


def _lane(shape: LaneShape, rows: Ints, joined: NDArray[np.bool_]) -> LaneLoad:
    private = np.minimum(rows, shape.private)
    for which, counts, room in (("rest", rows - private, shape.area_rows), ("back", rows.T, shape.back_rows)):
        for receiver in range(len(rows)):
            if PassPlan(counts[:, receiver].tolist(), 0, max(1, room)).passes > 1:
                raise ValueError(f"rank {receiver} takes the {which} of a step in several passes; that is not modelled")
    first = np.vectorize(lambda count: shape.record_bytes(int(count)))(rows) + private * shape.row_bytes
    return LaneLoad(
        (first * joined).astype(np.float64),
        ((rows - private) * shape.row_bytes * joined).astype(np.float64),
        (rows.T * shape.back_row_bytes * joined).astype(np.float64),
        rows,
        joined,
    )
