"""A transformers Cache whose keys and values live in leased pages.

Runs inside the model's forward, on whatever thread that is. `update` writes the new tokens into their pages, calls
`on_written`, and returns keys and values gathered in the form (shape, strides, alignment) that a DynamicCache returns:
attention then does the same arithmetic in the same order, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

Written = Callable[[int, int, int], None]
"""Called with (layer, first token, end token) when the keys and values of those tokens are in their pages."""


class PairPagedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed for us
    """One layer: a view of that layer's pages and the block table of the request."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, index: int, pages: torch.Tensor, table: torch.Tensor, on_written: Written | None) -> None:
        """Take `pages` [pages][2][heads][tokens][dim] of this layer and the block table."""
        super().__init__()
        self.index = index
        self.pages = pages
        self.table = table
        self.length = 0
        self.is_initialized = True
        self._on_written = on_written

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the memory was there before the model."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [1][heads][new tokens][dim] into the pages and return all keys and values so far."""
        _, _, heads, page_tokens, head_dim = self.pages.shape
        expected = (1, heads, key_states.shape[-2], head_dim)
        if tuple(key_states.shape) != expected or tuple(value_states.shape) != expected:
            raise ValueError(f"keys and values must be {expected}, got {key_states.shape} and {value_states.shape}")
        start, end = self.length, self.length + key_states.shape[-2]
        if end > self.get_max_length():
            raise ValueError(f"token {end - 1} is beyond the {len(self.table)} leased pages of {page_tokens} tokens")
        positions = torch.arange(start, end, device=self.table.device)
        page, slot = self.table[positions // page_tokens], positions % page_tokens
        self.pages[page, 0, :, slot] = key_states[0].transpose(0, 1)
        self.pages[page, 1, :, slot] = value_states[0].transpose(0, 1)
        self.length = end
        if self._on_written is not None:
            self._on_written(self.index, start, end)
        return self.gather(end)

    def gather(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return contiguous keys and values [1][heads][length][dim] of the first `length` tokens."""
        _, _, heads, page_tokens, head_dim = self.pages.shape
        full, rest = divmod(length, page_tokens)
        gathered = torch.empty((2, 1, heads, length, head_dim), dtype=self.pages.dtype, device=self.pages.device)
        if full:
            chosen = torch.index_select(self.pages, 0, self.table[:full])  # several times faster than self.pages[table]
            pages = chosen.permute(1, 2, 0, 3, 4)  # [2][heads][pages][tokens][dim]
            gathered[:, 0, :, : full * page_tokens].view(pages.shape).copy_(pages)
        if rest:
            last = torch.index_select(
                self.pages, 0, self.table[full : full + 1]
            )  # an index of no dimension would be read
            gathered[:, 0, :, full * page_tokens :] = last[0, :, :, :rest]
        return gathered[0], gathered[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (length of keys, offset) of the coming attention."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return how many tokens are in the pages."""
        return self.length

    def get_max_length(self) -> int:
        """Return how many tokens the leased pages can hold."""
        return int(self.table.numel()) * int(self.pages.shape[3])

    def reset(self) -> None:
        """Forget all tokens, keep the pages."""
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens (transformers counts them as a negative number)."""
        if tokens_to_remove > 0 or -tokens_to_remove > self.length:
            raise ValueError(f"tokens_to_remove must be in {-self.length}..0, got {tokens_to_remove}")
        self.length += tokens_to_remove

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Refuse: pages belong to one sequence, there are no beams."""
        raise NotImplementedError("a paged cache holds one sequence; beam search is not supported")


class PairPagedCache(Cache):  # type: ignore[misc]  # transformers is not typed for us
    """The cache of one request: `table` lists its pages, `length` tokens of them are filled already."""

    def __init__(
        self, pool: torch.Tensor, table: Sequence[int], *, length: int = 0, on_written: Written | None = None
    ) -> None:
        """View the leased pages `table` of `pool`, the tensor of a KvPool of order HND.

        A decode node starts with the `length` tokens that arrived.
        """
        block_table = torch.tensor(list(table), dtype=torch.int64, device=pool.device)
        layers = [PairPagedLayer(index, pages, block_table, on_written) for index, pages in enumerate(pool)]
        for layer in layers:
            layer.length = length
        super().__init__(layers=list(layers))
        self.paged_layers = layers
