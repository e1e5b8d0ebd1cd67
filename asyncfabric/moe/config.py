"""MoeConfig: the shape of one exchange, the same on all ranks; and where experts live.

Pure values, any thread. Buffer sizes are worked out in `host.buffers`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
INDEX_DTYPES = (torch.int32, torch.int64)
OUT_DTYPES = ("bfloat16", "float16", "float32")
GIB = 1 << 30
DEFAULT_PRIVATE_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """How tokens travel to experts and back. All ranks must use equal values; opening checks it.

    Attributes:
        num_experts: experts of the layer. Rank r holds a contiguous range of them; where they do not divide evenly, the
            first ranks hold one more.
        top_k: experts of one token, 1..64.
        hidden: elements of one token, a multiple of 16.
        max_tokens: most tokens that one rank dispatches in a step.
        ranks: ranks of the exchange.
        in_dtype: what is dispatched: bfloat16, float16, float32 or float8_e4m3fn.
        scale_block: elements of a token that share one fp32 scale; 0: tokens have no scales.
        out_dtype: what experts give back and combine returns: bfloat16, float16 or float32.
        expert_alignment: the rows of each expert begin at a multiple of this many rows; the gap is zeros.
        node_size: ranks of one node. Above 1, a token crosses to another node once, whatever experts it has there.
        private_tokens: tokens that a rank pushes to each other rank without waiting for routes; None: 128, or
            max_tokens if that is less. More of them need more memory, less of them more second writes.
        in_flight: steps that may be dispatched before the first of them is combined.
        buffer_limit_bytes: what the exchange may allocate on one rank, at most.
    """

    num_experts: int
    top_k: int
    hidden: int
    max_tokens: int
    ranks: int
    in_dtype: str = "bfloat16"
    scale_block: int = 0
    out_dtype: str = "bfloat16"
    expert_alignment: int = 1
    node_size: int = 1
    private_tokens: int | None = None
    in_flight: int = 2
    buffer_limit_bytes: int = 2 * GIB

    def __post_init__(self) -> None:
        """Check every value and name the wrong one."""
        bounds = {
            "num_experts": (1, 1 << 16),
            "top_k": (1, 64),
            "hidden": (16, 1 << 20),
            "max_tokens": (1, 1 << 20),
            "ranks": (1, 1024),
            "scale_block": (0, self.hidden),
            "expert_alignment": (1, 1 << 16),
            "node_size": (1, self.ranks),
            "in_flight": (1, 16),
            "buffer_limit_bytes": (1, 1 << 50),
        }
        if self.private_tokens is not None:
            bounds["private_tokens"] = (0, self.max_tokens)
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, got {type(value).__name__} {value!r}")
            if not least <= value <= most:
                raise ValueError(f"{name} must be in {least}..{most}, got {value}")
        if self.hidden % 16:
            raise ValueError(f"hidden must be a multiple of 16, got {self.hidden}")
        if self.ranks % self.node_size:
            raise ValueError(f"ranks must be a multiple of node_size {self.node_size}, got {self.ranks}")
        if self.in_dtype not in DTYPES:
            raise ValueError(f"in_dtype must be one of {sorted(DTYPES)}, got {self.in_dtype!r}")
        if self.out_dtype not in OUT_DTYPES:
            raise ValueError(f"out_dtype must be one of {sorted(OUT_DTYPES)}, got {self.out_dtype!r}")
        if self.scale_block and self.hidden % self.scale_block:
            raise ValueError(f"scale_block must divide hidden {self.hidden}, got {self.scale_block}")

    @property
    def in_torch(self) -> torch.dtype:
        """The dtype of dispatched tokens."""
        return DTYPES[self.in_dtype]

    @property
    def out_torch(self) -> torch.dtype:
        """The dtype of expert outputs and of what combine returns."""
        return DTYPES[self.out_dtype]

    @property
    def scales(self) -> int:
        """Scales of one token."""
        return self.hidden // self.scale_block if self.scale_block else 0

    @property
    def private(self) -> int:
        """Tokens of a private slot."""
        if self.private_tokens is None:
            return min(self.max_tokens, DEFAULT_PRIVATE_TOKENS)
        return self.private_tokens

    @property
    def nodes(self) -> int:
        """Nodes of the exchange."""
        return self.ranks // self.node_size

    def experts_of(self, rank: int) -> range:
        """Return the experts that a rank holds.

        Raises:
            ValueError: no such rank.
        """
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank must be in 0..{self.ranks - 1}, got {rank}")
        each, more = divmod(self.num_experts, self.ranks)
        first = rank * each + min(rank, more)
        return range(first, first + each + (rank < more))

    def with_tokens(self, max_tokens: int) -> MoeConfig:
        """Return the same shape for another number of tokens."""
        private = None if self.private_tokens is None else min(self.private_tokens, max_tokens)
        return replace(self, max_tokens=max_tokens, private_tokens=private)
