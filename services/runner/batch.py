"""What one forward pass computes: spans of several requests, packed into one row of tokens. Runs on the compute thread.

A span of many tokens is a chunk of a prompt, a span of one token is a step of decoding; a batch may mix them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

AfterLayer = Callable[[int, range], None]
"""Called with (layer, positions) when the keys and values of these positions of one request are in its pages."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Consecutive new tokens of one request.

    Attributes:
        tokens: token ids to compute, at least one.
        start: position of the first; the positions before it are in the pages already.
        table: page ids of the request, enough for all positions up to the last new one.
        after_layer: called on the compute thread; what it raises ends the pass.
    """

    tokens: Sequence[int]
    start: int
    table: Sequence[int]
    after_layer: AfterLayer | None = None

    @property
    def end(self) -> int:
        """Position after the last new token."""
        return self.start + len(self.tokens)


class RunnerBatch:
    """The spans of one pass with the index tensors that every layer needs."""

    def __init__(self, spans: Sequence[TokenSpan], page_tokens: int, pages: int, device: torch.device) -> None:
        """Check the spans: ValueError for an empty one, for too few pages or for a page that the pool does not have."""
        if not spans:
            raise ValueError("a pass needs at least one span")
        for span in spans:
            if not span.tokens or span.start < 0:
                raise ValueError(f"a span needs a token and a start >= 0, got {len(span.tokens)} at {span.start}")
            if span.end > len(span.table) * page_tokens:
                raise ValueError(
                    f"token {span.end - 1} is beyond the {len(span.table)} leased pages of {page_tokens} tokens"
                )
            if min(span.table) < 0 or max(span.table) >= pages:
                raise ValueError(f"page ids must be in 0..{pages - 1}, got {min(span.table)}..{max(span.table)}")
        self.spans = tuple(spans)
        self.tables = [torch.tensor(list(span.table), dtype=torch.int64, device=device) for span in spans]
        positions = [torch.arange(span.start, span.end, device=device) for span in spans]
        self.positions = torch.cat(positions)
        self.page_of_row = torch.cat(
            [table[position // page_tokens] for table, position in zip(self.tables, positions, strict=True)]
        )
        self.slot_of_row = self.positions % page_tokens
        self.tokens = torch.tensor([token for span in spans for token in span.tokens], dtype=torch.int64, device=device)
        ends = torch.tensor([len(span.tokens) for span in spans], device=device).cumsum(0)
        self.last_rows = ends - 1
