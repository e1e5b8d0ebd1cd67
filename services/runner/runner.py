"""The runner: one forward pass over spans of several requests, greedy or sampled choice left to the caller.

Blocking; one thread at a time. Pages belong to whoever made the pool and leased the tables; nothing is kept between
passes, so a request can join, leave or move to another runner between any two of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from asyncfabric_services.runner import attention, row_rule
from asyncfabric_services.runner.batch import AfterLayer, RunnerBatch, TokenSpan
from asyncfabric_services.runner.model import LoadedModel
from asyncfabric_services.runner.paged_cache import PagedCache


class Runner:
    """Runs `loaded` over `pool`, a view as `PageShape.view` returns it.

    The answer to a request does not depend on its company: logits of a token are the same bits alone or in any batch,
    for any chunk and page size, computed as prompt or as answer (see row_rule and attention).
    """

    def __init__(self, loaded: LoadedModel, pool: torch.Tensor) -> None:
        """Compute one token beside the pool: raises ValueError for a model whose attention cannot be computed here."""
        shape = loaded.shape
        expected = (shape.layers, pool.shape[1], 2, shape.kv_heads, shape.page_tokens, shape.head_dim)
        if tuple(pool.shape) != expected:
            raise ValueError(f"the pool must be {expected}, got {tuple(pool.shape)}")
        self.loaded = loaded
        self.pool = pool
        loaded.model.set_attn_implementation(attention.NAME)
        self.rule = row_rule.install(loaded.model, shape.kv_heads, shape.head_dim)
        self._pass(torch.zeros_like(pool[:, :1]), [TokenSpan([0], 0, [0])])

    def step(self, spans: Sequence[TokenSpan]) -> torch.Tensor:
        """Compute the spans and write their pages; returns their last logits, float32 [spans][vocabulary] on the CPU.

        Raises ValueError for spans that their pages cannot hold, and what an `after_layer` raised.
        """
        return self._pass(self.pool, spans)

    @torch.inference_mode()
    def _pass(self, pool: torch.Tensor, spans: Sequence[TokenSpan]) -> torch.Tensor:
        batch = RunnerBatch(spans, self.loaded.shape.page_tokens, pool.shape[1], pool.device)
        cache = PagedCache(pool, batch)
        output = self.loaded.model(
            input_ids=batch.tokens[None],
            position_ids=batch.positions[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=batch.last_rows,
            paged_cache=cache,
            row_rule=self.rule,
        )
        logits: torch.Tensor = output.logits[0].float().cpu()
        return logits

    def prefill(
        self,
        tokens: Sequence[int],
        table: Sequence[int],
        *,
        chunk_tokens: int,
        start: int = 0,
        after_layer: AfterLayer | None = None,
    ) -> torch.Tensor:
        """Compute the prompt `tokens` from position `start` on, chunk by chunk; returns the last logits [vocabulary].

        `after_layer(layer, positions)` is called as soon as keys and values of `positions` are in their pages, layer by
        layer, chunk by chunk; what it raises ends the prefill, which is how a waiting thread is stopped.
        """
        logits = torch.empty(0)
        for first, end in chunks(len(tokens), chunk_tokens, start):
            logits = self.step([TokenSpan(tokens[first:end], first, table, after_layer)])[0]
        return logits


def chunks(total: int, size: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """Yield consecutive (start, end) of at most `size` tokens from `start` to `total`; at least one token is needed."""
    if not 0 <= start < total or size < 1:
        raise ValueError(f"expected 0 <= start < total and size >= 1, got {start}, {total} and {size}")
    for first in range(start, total, size):
        yield first, min(first + size, total)
