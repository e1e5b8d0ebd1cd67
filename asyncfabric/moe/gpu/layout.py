"""NvlinkLayout: where everything lies in the memory that one rank stores to for another. Pure values, any thread.

From each rank to each other there is a block: [verdict][parcel of turn 0][parcel of turn 1]... A parcel has a place for
every token, so nothing about room is ever agreed on. Among the GPUs of a host a token's number is its place, and words
show what has arrived. Behind a proxy rows are packed, the first `private_tokens` leave with what stands before them,
and arrivals are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from asyncfabric.moe.config import MoeConfig

VERDICT_BYTES = 256
GRAIN, LINE_BYTES = 256, 128
MAX_RANKS, MAX_HOST_RANKS, MAX_EXPERTS, MAX_TOP_K = 32, 8, 1023, 32
ORDINALS = 1 << 22
STAGE_BYTES = 14336
"""Of a row that a warp moves at once: so many that a block with all its warps fits a multiprocessor."""
PIECE_CHOICES, MOST_PIECES = 4096, 8
SEND_WARPS, RECEIVE_WARPS, BACK_WARPS, RING_BYTES = 4, 8, 8, 8192
PAIR_BYTES = 8
WORD_BYTES, HEAD_BYTES = 4, 8
LATE_WEIGHT_BYTES = 8
"""Of a weight, and of the step that it belongs to."""
FP8_BLOCK = 128
"""Elements that share a scale where kernels cast."""
FEW_TOKENS, LEAST_PART_BYTES, SENDING_WARPS = 512, 1792, 132 * BACK_WARPS


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes of each part of a parcel, in their order; also the offsets of them."""

    head: int
    record_words: int
    counts: int
    pairs: int
    token_words: int
    slots: int
    head_word: int
    back_words: int
    back: int
    late_weights: int


@dataclass(frozen=True)
class NvlinkLayout:
    """Sizes of an exchange among GPUs, or of one lane of it.

    Attributes:
        config: the shape.
        more_words: of 4 bytes that travel with each token behind its scales.
        most_choices: how many choices of a token are of one rank, at most; None: all may be. Kernels do not look at it:
            where it is given, the caller makes the choices so, as `spread` of the lanes and CudaRankExchange do.
        slot_rows: rows of each expert, which begin at multiples of as many; weights are given to `combine` then. 0: the
            rows of experts lie close together, and weights travel with the routes.

    Raises:
        ValueError: the kernels cannot do what the config asks for.
    """

    config: MoeConfig
    more_words: int = 0
    most_choices: int | None = None
    slot_rows: int = 0

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
    def words(self) -> int:
        """Words that travel with a token: its scales, and what is behind them."""
        return self.config.scales + self.more_words

    @property
    def slot_bytes(self) -> int:
        """Bytes of a token and its words on the way: whole lines where there are words."""
        if not self.words:
            return self.row_bytes
        return -(-(self.row_bytes + self.words * WORD_BYTES) // LINE_BYTES) * LINE_BYTES

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
        """Into how many parts a row is cut on the way back: with few tokens there are more warps than rows.

        8 where each warp gets one part at most, otherwise 4: a part costs a warp about as much as a row.
        """
        config = self.config
        if config.max_tokens > FEW_TOKENS:
            return 1
        sums = config.max_tokens * max(1, config.ranks - 1)
        fitting = [8, 4] if 8 * sums <= SENDING_WARPS else [4]
        return next((parts for parts in fitting if self.back_row_bytes >= parts * LEAST_PART_BYTES), 1)

    @property
    def routers(self) -> int:
        """Blocks that route, each a piece of the tokens."""
        return max(1, min(MOST_PIECES, self.config.max_tokens * self.config.top_k // PIECE_CHOICES))

    @property
    def stage_bytes(self) -> int:
        """Bytes of a token that a warp moves at once, as the caller has it."""
        return min(2 * self.row_bytes if self.casts else self.row_bytes, STAGE_BYTES)

    @property
    def casts(self) -> bool:
        """Whether a dispatch can be given tokens of bfloat16 and send them as fp8: rows in slots, scales of 128."""
        config = self.config
        return bool(self.slot_rows) and config.in_dtype == "float8_e4m3fn" and config.scale_block == FP8_BLOCK

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
        """Bytes of each part of a parcel."""
        config = self.config
        tokens = config.max_tokens
        return Parts(
            head=HEAD_BYTES,
            record_words=self.routers * WORD_BYTES,
            counts=self.routers * self.most_experts * WORD_BYTES,
            pairs=tokens * config.top_k * PAIR_BYTES,
            token_words=tokens * WORD_BYTES,
            slots=tokens * self.slot_bytes,
            head_word=WORD_BYTES,
            back_words=tokens * self.parts * WORD_BYTES,
            back=tokens * self.back_row_bytes,
            late_weights=tokens * config.top_k * LATE_WEIGHT_BYTES if self.slot_rows else 0,
        )

    @cached_property
    def offsets(self) -> Parts:
        """Where in a parcel each part begins."""
        found, at = {}, 0
        for each in fields(Parts):
            found[each.name] = at
            at += _grains(getattr(self.sizes, each.name))
        return Parts(**found)

    @property
    def turn_bytes(self) -> int:
        """Bytes of a parcel."""
        return self.offsets.late_weights + _grains(self.sizes.late_weights)

    @property
    def block_bytes(self) -> int:
        """Bytes that one rank stores to for another."""
        return VERDICT_BYTES + self.config.in_flight * self.turn_bytes

    @property
    def region_bytes(self) -> int:
        """Bytes that the ranks of a host store to."""
        return self.config.ranks * self.block_bytes

    def parcel(self, step: int) -> int:
        """Return where in a block the parcel of a step begins; steps are counted from 1."""
        return VERDICT_BYTES + (step - 1) % self.config.in_flight * self.turn_bytes

    def first_span(self, step: int) -> tuple[int, int]:
        """Return (begin, end) in a block of what a dispatch sends through a proxy at once: routes and private rows."""
        at = self.parcel(step)
        return at, at + self.offsets.slots + self.config.private * self.slot_bytes

    def rest_span(self, step: int, rows: int) -> tuple[int, int]:
        """Return (begin, end) of the packed rows that the first write left; empty where all were private."""
        at = self.parcel(step) + self.offsets.slots
        return at + self.config.private * self.slot_bytes, at + max(rows, self.config.private) * self.slot_bytes

    def back_span(self, step: int, rows: int) -> tuple[int, int]:
        """Return (begin, end) of the sums that go back through a proxy for as many rows as came."""
        at = self.parcel(step) + self.offsets.back
        return at, at + rows * self.back_row_bytes

    def row_capacity(self, rank: int) -> int:
        """Rows that experts of a rank can get at most, with padding."""
        experts = len(self.config.experts_of(rank))
        if not experts:
            return 0
        config = self.config
        if self.slot_rows:
            return experts * self.slot_rows
        choices = config.top_k if self.most_choices is None else self.most_choices
        return config.ranks * config.max_tokens * choices + experts * (config.expert_alignment - 1)

    def buffer_bytes(self, rank: int) -> int:
        """Bytes of GPU memory that a rank allocates."""
        return self.region_bytes + self.config.in_flight * self.handle_bytes(rank)

    def handle_bytes(self, rank: int) -> int:
        """Bytes of what a step hands out: rows, scales, where each came from, and the rows of all choices."""
        config = self.config
        row = self.row_bytes + self.words * WORD_BYTES + 3 * WORD_BYTES
        choices = config.ranks * self.sizes.pairs
        return self.row_capacity(rank) * row + choices + (2 * config.ranks + 1) * config.max_tokens * WORD_BYTES


def _grains(length_bytes: int) -> int:
    return -(-length_bytes // GRAIN) * GRAIN
