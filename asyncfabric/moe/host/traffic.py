"""What a step costs on the wire, worked out from the routes alone: the protocol's counts, for tests and benches.

Pure functions, any thread. Without nodes: a step by the nodes is two of these, one for each lane.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from asyncfabric.moe.config import MoeConfig
from asyncfabric.moe.host.passes import PassPlan
from asyncfabric.moe.host.routing import Experts, Ints, owner_of_expert, owners, plan_route
from asyncfabric.moe.host.session import plan_lanes


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one rank sends to the others in one step.

    Attributes:
        dispatch_writes: writes of the dispatch; each carries an immediate.
        combine_writes: writes of the combine; each carries an immediate, those without rows no bytes.
        signals: immediates without data, which report that a pass was taken.
        dispatch_bytes, combine_bytes: their payload.
    """

    dispatch_writes: int
    combine_writes: int
    signals: int
    dispatch_bytes: int
    combine_bytes: int

    @property
    def requests(self) -> int:
        """Work requests of the whole step on one rail, as many as immediates."""
        return self.dispatch_writes + self.combine_writes + self.signals


def row_counts(config: MoeConfig, indices: Sequence[Experts]) -> Ints:
    """Return how many rows each rank sends to each other, shape [ranks, ranks]."""
    owner = owner_of_expert([config.experts_of(rank) for rank in range(config.ranks)], config.num_experts)
    return np.stack([plan_route(owners(each, owner), config.ranks).counts for each in indices])


def step_traffic(config: MoeConfig, indices: Sequence[Experts], rank: int, mapped: Collection[int] = ()) -> Traffic:
    """Return what a rank sends in one step in which the ranks dispatch tokens with these experts.

    Args:
        config: the shape.
        indices: the experts of each rank's tokens.
        rank: the sender.
        mapped: ranks in whose memory it stores records and rows itself (`MoeExchange.mapped_ranks`): writes to them
            have no bytes.

    Raises:
        ValueError: the config has nodes.
    """
    if config.node_size != 1:
        raise ValueError(f"traffic is worked out for node_size 1, got {config.node_size}")
    (lane,) = plan_lanes(config, rank, range(config.ranks))
    shape, counts = lane.shape, row_counts(config, indices)
    others = [other for other in range(config.ranks) if other != rank]
    rest = (counts - shape.private).clip(min=0)
    there = {
        receiver: PassPlan(rest[:, receiver].tolist(), receiver, shape.area_rows) for receiver in range(config.ranks)
    }
    back = {
        receiver: PassPlan(counts[receiver].tolist(), receiver, shape.back_rows) for receiver in range(config.ranks)
    }
    rest_writes = sum(_parts(there[other], rank) for other in others)
    # The first pass of what goes back has a write to everybody, with rows or without.
    back_writes = sum(_parts(back[other], rank, later=True) + 1 for other in others)
    taken = sum(
        sum(sender != rank for sender in plan.senders(number))
        for plan in (there[rank], back[rank])
        for number in range(1, plan.passes)
    )
    written = [other for other in others if other not in mapped]
    records = sum(shape.record_bytes(int(counts[rank, other])) for other in written)
    return Traffic(
        dispatch_writes=len(others) + rest_writes,
        combine_writes=back_writes,
        signals=taken,
        dispatch_bytes=records + sum(int(counts[rank, other]) for other in written) * shape.row_bytes,
        combine_bytes=sum(int(counts[other, rank]) for other in written) * shape.back_row_bytes,
    )


def _parts(plan: PassPlan, sender: int, *, later: bool = False) -> int:
    """Return in how many passes a sender has rows; `later`: not counting the first."""
    return sum(bool(plan.segment(sender, number).rows) for number in range(int(later), plan.passes))
