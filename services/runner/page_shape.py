"""How keys and values lie in pages, and the view of a pool in memory that somebody else owns. Pure arithmetic.

A pool is [layers][pages][2][kv heads][page tokens][head dim]: keys then values, heads outside tokens (order HND), so
that one page of one layer is one contiguous range, and so is a range of its heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class PageShape:
    """The form of one model's pages.

    Attributes:
        layers: attention layers of the model.
        kv_heads: key/value heads of one layer.
        head_dim: elements of one head.
        page_tokens: tokens of one page.
        dtype: element type, a key of DTYPES.
    """

    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: str

    def __post_init__(self) -> None:
        """Check every number and name the wrong one."""
        for name in ("layers", "kv_heads", "head_dim", "page_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {sorted(DTYPES)}, got {self.dtype!r}")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer: keys and values."""
        return 2 * self.kv_heads * self.page_tokens * self.head_dim * DTYPES[self.dtype].itemsize

    def pool_bytes(self, pages: int) -> int:
        """Return the length of a pool of `pages` pages."""
        return self.layers * pages * self.page_bytes

    def pages_for(self, tokens: int) -> int:
        """Return how many pages `tokens` tokens need, the last one perhaps partly filled."""
        return -(-tokens // self.page_tokens)

    def view(self, memory: torch.Tensor, pages: int) -> torch.Tensor:
        """View flat uint8 `memory` as a pool; raises ValueError when its length or type is another.

        Nothing is copied: what the runner writes is in `memory`, and what others write there (a transfer) is what the
        runner reads.
        """
        if memory.dtype != torch.uint8 or memory.dim() != 1 or memory.numel() != self.pool_bytes(pages):
            raise ValueError(
                f"memory of {pages} pages must be {self.pool_bytes(pages)} flat bytes of uint8, "
                f"got {list(memory.shape)} of {memory.dtype}"
            )
        shape = (self.layers, pages, 2, self.kv_heads, self.page_tokens, self.head_dim)
        return memory.view(DTYPES[self.dtype]).view(shape)
