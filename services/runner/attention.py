"""Attention over pages, request by request, in tiles whose shape depends on a token's position alone.

The token at position p attends over (p // TILE + 1) * TILE keys, the later ones masked, whether it is decoded alone, in
a batch, or prefilled in a chunk of any size: sums over keys then always have the same length and order, and with the
rows of products under the row rule, the same bits. Registered with transformers as an attention implementation.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from asyncfabric_services.runner.paged_cache import PagedCache
from asyncfabric_services.runner.row_rule import RowRule

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
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return [1][rows][query heads][dim] for query [1][query heads][rows][dim]; keys and values come from the pages."""
    layer = paged_cache.paged_layers[module.layer_idx]
    out = torch.empty_like(query[0].transpose(0, 1))  # [rows][query heads][dim]
    first = 0
    for span, table in zip(paged_cache.batch.spans, paged_cache.batch.tables, strict=True):
        keys, values = layer.gather(table, span.end, -(-span.end // TILE) * TILE)
        position = span.start
        while position < span.end:
            tile_end = (position // TILE + 1) * TILE
            end = min(span.end, tile_end)
            rows = slice(first + position - span.start, first + end - span.start)
            attended = _tile(query[0, :, rows], keys[:, :tile_end], values[:, :tile_end], position, scaling, row_rule)
            out[rows] = attended.transpose(0, 1)
            position = end
        first += len(span.tokens)
    return out.unsqueeze(0), None


def _tile(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int, scaling: float, rule: RowRule
) -> torch.Tensor:
    """Attend with query [query heads][rows][dim], the first row at `position`, over keys [kv heads][length][dim]."""
    heads, count, dim = query.shape
    kv_heads, length = keys.shape[:2]
    rows = query.reshape(kv_heads, heads // kv_heads * count, dim)  # query heads of one kv head stand together
    scores = rule.product(rows, keys.transpose(1, 2)) * scaling
    places = torch.arange(position, position + count, device=query.device).repeat(heads // kv_heads)
    later = torch.arange(length, device=query.device) > places[:, None]
    weights = torch.softmax(scores.float().masked_fill_(later, float("-inf")), dim=-1).to(query.dtype)
    return rule.product(weights, values).reshape(heads, count, dim)


AttentionInterface.register(NAME, paged_attention)
