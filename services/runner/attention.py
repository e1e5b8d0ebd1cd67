"""Attention over pages, request by request, in tiles whose shape depends on a token's position alone.

The token at position p attends over (p // TILE + 1) * TILE keys, the later ones masked, whether it is decoded alone, in
a batch, or prefilled in a chunk of any size: sums over keys then always have the same length and order, and with the
rows of products under the row rule, the same bits. With a sliding window, the keys begin at the multiple of TILE at or
before the window of the tile's first token. Registered with transformers as an attention implementation.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from asyncfabric_services.runner.paged_cache import PagedCache
from asyncfabric_services.runner.row_rule import RowRule
from asyncfabric_services.runner.supported import refuse_arguments

TILE = 16
NAME = "asyncfabric_paged"


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged_cache: PagedCache,
    row_rule: RowRule,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return [1][rows][query heads][dim] for query [1][query heads][rows][dim]; keys and values come from the pages.

    With a window of w tokens, the token at position p attends over positions p - w + 1 to p. Raises ValueError for an
    argument that this attention does not compute.
    """
    refuse_arguments(kwargs)
    layer = paged_cache.paged_layers[module.layer_idx]
    out = torch.empty_like(query[0].transpose(0, 1))  # [rows][query heads][dim]
    first = 0
    for span, table in zip(paged_cache.batch.spans, paged_cache.batch.tables, strict=True):
        keys, values = layer.gather(table, span.end, -(-span.end // TILE) * TILE)
        position = span.start
        while position < span.end:
            tile = _Tile(position, sliding_window)
            end = min(span.end, tile.end)
            rows = slice(first + position - span.start, first + end - span.start)
            attended = tile.attend(query[0, :, rows], keys, values, scaling, row_rule)
            out[rows] = attended.transpose(0, 1)
            position = end
        first += len(span.tokens)
    return out.unsqueeze(0), None


class _Tile:
    """The tokens from `position` to the next multiple of TILE: the keys that they may see, by its place alone."""

    def __init__(self, position: int, window: int | None) -> None:
        self.position = position
        self.window = window
        begin = position // TILE * TILE
        self.end = begin + TILE
        self.begin = 0 if window is None else max(0, begin - window + 1) // TILE * TILE

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, rule: RowRule
    ) -> torch.Tensor:
        """Attend with query [query heads][rows][dim], the first at `position`, over keys [kv heads][length][dim]."""
        keys, values = keys[:, self.begin : self.end], values[:, self.begin : self.end]
        heads, count, dim = query.shape
        kv_heads = keys.shape[0]
        rows = query.reshape(kv_heads, heads // kv_heads * count, dim)  # query heads of one kv head stand together
        scores = rule.product(rows, keys.transpose(1, 2)) * scaling
        places = torch.arange(self.position, self.position + count, device=query.device).repeat(heads // kv_heads)
        seen = torch.arange(self.begin, self.end, device=query.device)
        hidden = seen > places[:, None]
        if self.window is not None:
            hidden |= seen <= places[:, None] - self.window
        weights = torch.softmax(scores.float().masked_fill_(hidden, float("-inf")), dim=-1).to(query.dtype)
        return rule.product(weights, values).reshape(heads, count, dim)


AttentionInterface.register(NAME, paged_attention)
