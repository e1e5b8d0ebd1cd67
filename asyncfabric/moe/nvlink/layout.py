"""NvlinkLayout: where everything lies in the memory that the other GPUs store to. Pure values, any thread.

A region is [verdicts][turn 0][turn 1]...; a turn has a place for every token of every rank, so nothing about room is
ever agreed on: a token's number is its place. What rows there are is told by records, what has arrived by words.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from asyncfabric.moe.config import MoeConfig

VERDICT_BYTES = 256
GRAIN = 256
MAX_RANKS, MAX_EXPERTS, MAX_TOP_K = 8, 1023, 32
ORDINALS = 1 << 22
STAGE_BYTES = 14336
"""Of a row that a warp moves at once: so many that a block with all its warps fits a multiprocessor."""
PIECE_CHOICES, MOST_PIECES = 4096, 8
SEND_WARPS, RECEIVE_WARPS, BACK_WARPS, RING_BYTES = 4, 8, 8, 8192
PAIR_BYTES = 8
WORD_BYTES = 4
FEW_TOKENS, PARTS, LEAST_PART_BYTES = 512, 4, 2048


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes of each part of a turn, in their order; also the offsets of them."""

    slots: int
    scale_slots: int
    counts: int
    pairs: int
    back: int
    tokens: int
    record_words: int
    token_words: int
    head_words: int
    back_words: int


@dataclass(frozen=True)
class NvlinkLayout:
    """Sizes of an exchange among GPUs.

    Raises:
        ValueError: the kernels cannot do what the config asks for.
    """

    config: MoeConfig

    def __post_init__(self) -> None:
        """Check what kernels demand beyond MoeConfig."""
        config = self.config
        bounds = {"ranks": MAX_RANKS, "num_experts": MAX_EXPERTS, "top_k": MAX_TOP_K, "node_size": 1}
        for name, most in bounds.items():
            if getattr(config, name) > most:
                raise ValueError(f"{name} can be {most} at most on GPUs, got {getattr(config, name)}")
        if config.max_tokens * config.top_k >= ORDINALS:
            raise ValueError(f"max_tokens * top_k must be below {ORDINALS}, got {config.max_tokens * config.top_k}")
        if config.in_flight & (config.in_flight - 1):
            raise ValueError(f"in_flight must be a power of two on GPUs, got {config.in_flight}")

    @property
    def row_bytes(self) -> int:
        """Bytes of a token."""
        return self.config.hidden * self.config.in_torch.itemsize

    @property
    def back_row_bytes(self) -> int:
        """Bytes of a row that comes back."""
        return self.config.hidden * self.config.out_torch.itemsize

    @property
    def most_experts(self) -> int:
        """Experts of the rank that has most."""
        return len(self.config.experts_of(0))

    @property
    def parts(self) -> int:
        """Into how many parts a row is cut on the way back: with few tokens there are more warps than rows."""
        few = self.config.max_tokens <= FEW_TOKENS and self.back_row_bytes >= PARTS * LEAST_PART_BYTES
        return PARTS if few else 1

    @property
    def routers(self) -> int:
        """Blocks that route, each a piece of the tokens."""
        return max(1, min(MOST_PIECES, self.config.max_tokens * self.config.top_k // PIECE_CHOICES))

    @property
    def stage_bytes(self) -> int:
        """Bytes of a row that a warp moves at once."""
        return min(self.row_bytes, STAGE_BYTES)

    @property
    def dispatch_shared_bytes(self) -> int:
        """Shared memory of a block that dispatches: stages, or the counts of the block that routes."""
        warps, experts = SEND_WARPS + RECEIVE_WARPS, self.config.num_experts
        places = self.most_experts * (self.config.ranks * self.routers + 1) + 1
        return max(warps * self.stage_bytes + places * WORD_BYTES, (warps + 1) * experts * WORD_BYTES)

    @property
    def combine_shared_bytes(self) -> int:
        """Shared memory of a block that combines."""
        return BACK_WARPS * RING_BYTES

    @cached_property
    def sizes(self) -> Parts:
        """Bytes of each part of a turn."""
        config = self.config
        ranks, tokens = config.ranks, config.ranks * config.max_tokens
        return Parts(
            slots=tokens * self.row_bytes,
            scale_slots=tokens * config.scales * WORD_BYTES,
            counts=ranks * self.routers * self.most_experts * WORD_BYTES,
            pairs=tokens * config.top_k * PAIR_BYTES,
            back=tokens * self.back_row_bytes,
            tokens=ranks * WORD_BYTES,
            record_words=ranks * self.routers * WORD_BYTES,
            token_words=tokens * WORD_BYTES,
            head_words=ranks * WORD_BYTES,
            back_words=tokens * self.parts * WORD_BYTES,
        )

    @cached_property
    def offsets(self) -> Parts:
        """Where in a turn each part begins."""
        found, at = {}, 0
        for each in fields(Parts):
            found[each.name] = at
            at += _grains(getattr(self.sizes, each.name))
        return Parts(**found)

    @property
    def turn_bytes(self) -> int:
        """Bytes of a turn."""
        return self.offsets.back_words + _grains(self.sizes.back_words)

    @property
    def region_bytes(self) -> int:
        """Bytes that other ranks store to."""
        return VERDICT_BYTES + self.config.in_flight * self.turn_bytes

    def row_capacity(self, rank: int) -> int:
        """Rows that experts of a rank can get at most, with padding."""
        experts = len(self.config.experts_of(rank))
        if not experts:
            return 0
        config = self.config
        return config.ranks * config.max_tokens * config.top_k + experts * (config.expert_alignment - 1)

    def handle_bytes(self, rank: int) -> int:
        """Bytes of what a step hands out: rows, scales, where each came from, and the rows of all choices."""
        config = self.config
        row = self.row_bytes + config.scales * WORD_BYTES + 3 * WORD_BYTES
        return self.row_capacity(rank) * row + self.sizes.pairs + config.max_tokens * WORD_BYTES


def cuda_buffer_bytes(config: MoeConfig) -> int:
    """Return the bytes of GPU memory that an exchange among GPUs allocates on one rank.

    Raises:
        ValueError: the kernels cannot do what the config asks for.
    """
    layout = NvlinkLayout(config)
    return layout.region_bytes + config.in_flight * layout.handle_bytes(0)


def _grains(length_bytes: int) -> int:
    return -(-length_bytes // GRAIN) * GRAIN
