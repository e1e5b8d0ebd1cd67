"""A transformers Cache over the pages of several requests. Runs inside the model's forward, on the compute thread.

`update` puts the new rows into their pages and returns them unchanged; reading the pages back is the work of
`attention`, which alone knows where one request ends and the next begins.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from asyncfabric_services.runner.batch import RunnerBatch


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed for us
    """One layer: a view of that layer's pages [pages][2][heads][page tokens][dim] and the batch of this pass."""

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, index: int, pages: torch.Tensor, batch: RunnerBatch) -> None:
        super().__init__()
        self.index = index
        self.pages = pages
        self.batch = batch
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the memory was there before the model."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [1][heads][rows][dim] into the pages; returns the same tensors."""
        batch = self.batch
        expected = (1, self.pages.shape[2], len(batch.tokens), self.pages.shape[4])
        if tuple(key_states.shape) != expected or tuple(value_states.shape) != expected:
            raise ValueError(f"keys and values must be {expected}, got {key_states.shape} and {value_states.shape}")
        self.pages[batch.page_of_row, 0, :, batch.slot_of_row] = key_states[0].transpose(0, 1)
        self.pages[batch.page_of_row, 1, :, batch.slot_of_row] = value_states[0].transpose(0, 1)
        for span in batch.spans:
            if span.after_layer is not None:
                span.after_layer(self.index, range(span.start, span.end))
        return key_states, value_states

    def gather(self, table: torch.Tensor, length: int, padded: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return contiguous keys and values [heads][padded][dim] of `length` tokens, and zeros after them.

        Zeros and not what the last page holds there: a masked key has weight 0, but 0 times a stale NaN is NaN.
        """
        _, _, heads, page_tokens, head_dim = self.pages.shape
        used = -(-length // page_tokens)
        chosen = torch.index_select(self.pages, 0, table[:used])  # several times faster than self.pages[table]
        out = self.pages.new_empty((2, heads, padded, head_dim))
        full, rest = divmod(length, page_tokens)
        pages = chosen[:full].permute(1, 2, 0, 3, 4)  # [2][heads][pages][tokens][dim]
        out[:, :, : full * page_tokens].view(pages.shape).copy_(pages)
        if rest:
            out[:, :, full * page_tokens : length] = chosen[full, :, :, :rest]
        out[:, :, length:] = 0
        return out[0], out[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (length of keys, offset): no mask is made, attention makes its own for each request."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return 0: there is not one length, and positions are always given."""
        return 0

    def get_max_length(self) -> int:
        """Return how many tokens the pool can hold."""
        return int(self.pages.shape[0]) * int(self.pages.shape[3])

    def reset(self) -> None:
        """Do nothing: a pass holds no tokens of its own."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Refuse: pages belong to sequences, there are no beams."""
        raise NotImplementedError("a paged cache holds sequences; beam search is not supported")


class PagedCache(Cache):  # type: ignore[misc]  # transformers is not typed for us
    """The cache of one pass over `pool` [layers][pages][2][heads][page tokens][dim]."""

    def __init__(self, pool: torch.Tensor, batch: RunnerBatch) -> None:
        self.paged_layers = [PagedLayer(index, pages, batch) for index, pages in enumerate(pool)]
        super().__init__(layers=list(self.paged_layers))
        self.batch = batch
