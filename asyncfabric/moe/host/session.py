"""Session: the lanes of one epoch of an exchange, opened together and closed together.

Runs on the event loop's thread. An exchange has one session at a time; going on without a rank opens the next one, with
new memory, keys and immediates, so that nothing that is still under way can reach it.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from asyncfabric import Fabric, RegionKey
from asyncfabric.errors import RemoteProtocolError
from asyncfabric.moe.cards import Card
from asyncfabric.moe.config import MoeConfig
from asyncfabric.moe.gathering import gather_cards
from asyncfabric.moe.group import MoeGroup, connect_ranks
from asyncfabric.moe.host.arrivals import RankArrivals, immediates
from asyncfabric.moe.host.buffers import AREA_BYTES, LaneShape
from asyncfabric.moe.host.lane import Lane
from asyncfabric.moe.host.memory import LaneMemory, open_memory
from asyncfabric.moe.host.path import Filler, NodePath, Path, StraightPath
from asyncfabric.moe.host.routing import owner_of_expert
from asyncfabric.moe.immediates import first_imm, proposed_imm


@dataclass(frozen=True, slots=True)
class LanePlan:
    """A lane before it is opened: the ranks that it joins, in the order of members, and its sizes."""

    ranks: tuple[int, ...]
    shape: LaneShape


def plan_lanes(config: MoeConfig, rank: int, present: Sequence[int]) -> list[LanePlan]:
    """Return the lanes of a rank, for the ranks that are present: one, or one across nodes and one inside the node."""
    size = config.node_size
    if size == 1:
        return [LanePlan(tuple(present), _shape(config, len(present), config.max_tokens))]
    node, place = divmod(rank, size)
    nodes = sorted({each // size for each in present})
    across = tuple(each * size + place for each in nodes)
    inside = tuple(range(node * size, (node + 1) * size))
    return [
        LanePlan(across, _shape(config, len(across), config.max_tokens, lanes=2)),
        LanePlan(inside, _shape(config, size, config.max_tokens * len(across), lanes=2)),
    ]


def buffer_bytes(config: MoeConfig) -> int:
    """Return the bytes that an exchange allocates on one rank."""
    return sum(plan.shape.total_bytes for plan in plan_lanes(config, 0, range(config.ranks)))


@asynccontextmanager
async def open_session(
    fabric: Fabric, group: MoeGroup, config: MoeConfig, epoch: int, present: Sequence[int], fill: Filler
) -> AsyncIterator[Path]:
    """Open the lanes of one epoch with all ranks that are present; on leaving they are drained and released.

    Raises:
        MissingRankError: a rank is lost, or did not open before the caller's deadline.
        RemoteProtocolError: a rank opened with another configuration.

    Cancellation: what was opened is closed again, shielded; then it goes on.
    """
    plans = plan_lanes(config, group.rank, present)
    span = sum(immediates(len(plan.ranks), config.in_flight) for plan in plans)
    async with AsyncExitStack() as stack:
        peers = await connect_ranks(fabric, group, {rank for plan in plans for rank in plan.ranks} | set(present))
        memories: list[LaneMemory] = [
            await stack.enter_async_context(open_memory(fabric, plan.shape, config.out_torch)) for plan in plans
        ]
        card = Card(
            tag=group.tag,
            epoch=epoch,
            rank=group.rank,
            digest=hashlib.sha256(repr((config, tuple(present))).encode()).hexdigest()[:16],
            imm=proposed_imm(fabric),
            keys=tuple(bytes(memory.receive.key()) for memory in memories),
        )
        cards = await gather_cards(fabric, group, peers, card)
        odd = [rank for rank, other in cards.items() if other.digest != card.digest]
        if odd:
            raise RemoteProtocolError(
                f"ranks {odd} opened the exchange {group.tag!r} with another configuration or without other ranks",
                remedy="give equal MoeConfig values on all ranks, and exclude the same ranks everywhere",
            )
        base = first_imm(fabric, [card.imm, *(other.imm for other in cards.values())], span)
        lanes: list[Lane] = []
        for number, (plan, memory) in enumerate(zip(plans, memories, strict=True)):
            me = plan.ranks.index(group.rank)
            others = {member: rank for member, rank in enumerate(plan.ranks) if member != me}
            joined = {member: peers[rank] for member, rank in others.items()}
            keys = {member: RegionKey.from_bytes(cards[rank].keys[number]) for member, rank in others.items()}
            arrivals = RankArrivals(fabric, base, config.in_flight, me, joined)
            base += immediates(len(plan.ranks), config.in_flight)
            lane = Lane(fabric, memory, arrivals, me, plan.ranks, joined, keys)
            stack.push_async_callback(lane.close)
            lanes.append(lane)
        yield _path(config, group.rank, plans, lanes, fill)


def _shape(config: MoeConfig, members: int, tokens: int, lanes: int = 1) -> LaneShape:
    own = config.with_tokens(tokens)
    return LaneShape(
        members=members,
        max_tokens=tokens,
        top_k=config.top_k,
        fan_out=min(config.top_k, members),
        row_bytes=config.hidden * config.in_torch.itemsize,
        back_row_bytes=config.hidden * config.out_torch.itemsize,
        scales=config.scales,
        private=own.private,
        in_flight=config.in_flight,
        area_bytes=AREA_BYTES // lanes,
    )


def _path(config: MoeConfig, rank: int, plans: list[LanePlan], lanes: list[Lane], fill: Filler) -> Path:
    ranges = [config.experts_of(each) for each in plans[-1].ranks]
    owner = owner_of_expert(ranges, config.num_experts)
    if len(lanes) == 1:
        return StraightPath(lanes[0], owner, fill)
    nodes = []
    for each in plans[0].ranks:
        first = each // config.node_size * config.node_size
        nodes.append(range(config.experts_of(first).start, config.experts_of(first + config.node_size - 1).stop))
    return NodePath(lanes[0], lanes[1], owner_of_expert(nodes, config.num_experts), owner, fill)
