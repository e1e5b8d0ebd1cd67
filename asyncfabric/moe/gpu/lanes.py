"""The two lanes of an exchange by the nodes among GPUs, and the memory that either kind of exchange needs.

Pure values, any thread. Across: the ranks with one place in their nodes; an expert of this lane is a whole node, and a
token's choices travel with it as words. Inside: the ranks of a node; its tokens are the rows that crossed to each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from asyncfabric.moe.config import MoeConfig
from asyncfabric.moe.gpu.layout import MAX_RANKS, MAX_TOP_K, WORD_BYTES, NvlinkLayout


@dataclass(frozen=True, slots=True)
class NodeLanes:
    """Shapes of both lanes.

    Attributes:
        across: one copy of a token for each node where it has experts.
        inside: one copy for each rank of the node where it has experts.
    """

    config: MoeConfig
    across: NvlinkLayout
    inside: NvlinkLayout

    def node_experts(self, node: int) -> range:
        """Return the experts of a node."""
        return _node_experts(self.config, node)

    def members(self, rank: int, lane: NvlinkLayout) -> range:
        """Return the ranks that a rank has in one of the lanes, itself among them."""
        size = self.config.node_size
        node, place = divmod(rank, size)
        return range(place, self.config.ranks, size) if lane is self.across else range(node * size, (node + 1) * size)

    def present(self, rank: int, lane: NvlinkLayout, ranks: Sequence[int]) -> list[int]:
        """Return which members of a lane are among some ranks, counted in the lane."""
        return [number for number, member in enumerate(self.members(rank, lane)) if member in ranks]

    @property
    def between_bytes(self) -> int:
        """Bytes of what lies between the lanes in one step: what crosses with tokens, and sums of the node."""
        config = self.config
        rows = self.inside.config.max_tokens
        there = config.max_tokens * (config.nodes * 2 + self.across.words) * WORD_BYTES
        here = rows * (2 * config.top_k + self.inside.words) * WORD_BYTES
        found = self.inside.row_capacity(0) * config.scales * WORD_BYTES
        return there + here + found + rows * self.inside.back_row_bytes


def lanes_of(config: MoeConfig, node: int = 0) -> NodeLanes:
    """Return the lanes of an exchange by the nodes.

    Args:
        config: the shape, node_size above 1.
        node: whose lane inside is meant; nodes differ by one expert for each rank at most.

    Raises:
        ValueError: the kernels cannot do what the config asks for.
    """
    bounds = {"ranks": (config.ranks, MAX_RANKS), "top_k": (config.top_k, MAX_TOP_K)}
    for name, (value, most) in bounds.items():
        if value > most:
            raise ValueError(f"{name} can be {most} at most on GPUs, got {value}")
    if not _node_experts(config, config.nodes - 1):
        raise ValueError(f"each of {config.nodes} nodes needs an expert on GPUs, num_experts is {config.num_experts}")
    across = replace(
        config, num_experts=config.nodes, top_k=config.nodes, ranks=config.nodes, node_size=1, expert_alignment=1
    )
    inside = replace(
        config,
        num_experts=len(_node_experts(config, node)),
        ranks=config.node_size,
        node_size=1,
        max_tokens=config.nodes * config.max_tokens,
        private_tokens=None,
    )
    return NodeLanes(config, NvlinkLayout(across, 2 * config.top_k + 1, 1), NvlinkLayout(inside, 1))


def cuda_buffer_bytes(config: MoeConfig) -> int:
    """Return the bytes of GPU memory that an exchange among GPUs allocates on one rank.

    Raises:
        ValueError: the kernels cannot do what the config asks for.
    """
    if config.node_size == 1:
        return NvlinkLayout(config).buffer_bytes(0)
    lanes = lanes_of(config)
    return lanes.across.buffer_bytes(0) + lanes.inside.buffer_bytes(0) + config.in_flight * lanes.between_bytes


def _node_experts(config: MoeConfig, node: int) -> range:
    first, last = node * config.node_size, (node + 1) * config.node_size - 1
    return range(config.experts_of(first).start, config.experts_of(last).stop)
