"""Workload of `bench kv`: a stream of layers to leased pages, as a prefill node sends it once all is computed.

Run on the event loop of the source. What the stream costs its event loop is measured apart from how long it takes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from asyncfabric.bench.pattern import Pages
from asyncfabric.kv import KvLayout, KvOffer, KvPool, open_stream

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class StreamRun:
    """What one stream did.

    Attributes:
        started_ns, finished_ns: on the monotonic clock: before the plan was made, after the last acknowledgement.
        host_seconds: the part that kept the event loop: planning and posting.
        pages: pages of all layers.
    """

    started_ns: int
    finished_ns: int
    host_seconds: float
    pages: int


def layout_of(page_bytes: int, layers: int) -> KvLayout:
    """Return a layout with pages of this size; raises ValueError when they hold no whole tokens."""
    if page_bytes < 2 * PAGE_TOKENS or page_bytes % (2 * PAGE_TOKENS):
        raise ValueError(f"a page must be a multiple of {2 * PAGE_TOKENS} bytes, got {page_bytes}")
    head_dim = page_bytes // (2 * PAGE_TOKENS)
    heads = next(heads for heads in (8, 4, 2, 1) if head_dim % heads == 0)
    return KvLayout(layers=layers, kv_heads=heads, head_dim=head_dim // heads, page_tokens=PAGE_TOKENS, dtype="uint8")


async def stream_layers(pool: KvPool, offer: KvOffer, source_pages: Pages) -> StreamRun:
    """Push each layer once, then wait for all of it.

    Cancellation: drains what is posted.
    """
    fabric = pool.fabric
    started = time.monotonic_ns()
    async with open_stream(fabric, pool, offer, source_pages) as stream:
        for layer in range(pool.layout.layers):
            stream.push(layer, offer.tokens)
        posted = time.monotonic_ns()
        await stream.finish()
        finished = time.monotonic_ns()
    return StreamRun(started, finished, (posted - started) / 1e9, len(source_pages) * pool.layout.layers)
