"""Workload of `bench kv`: a stream of layers to leased pages, as a prefill node sends it once all is computed.

Run on the event loop of the source. What the stream costs its event loop is measured apart from how long it takes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from asyncfabric import RegionKey, Transfer, wait_all
from asyncfabric.bench.pattern import Pages
from asyncfabric.kv import KvLayout, KvOffer, KvPool, open_stream

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class StreamRun:
    """What one stream did, or the bare writes of the same pages.

    Attributes:
        started_ns, finished_ns: on the monotonic clock: before the plan was made, after the last acknowledgement.
        host_seconds: the part that kept the event loop: planning and posting.
        push_seconds: CPU of the event loop's thread in all pushes together, or in all bare calls.
        pushes: pushes, or bare calls.
        pages: pages of all layers.
    """

    started_ns: int
    finished_ns: int
    host_seconds: float
    push_seconds: float
    pushes: int
    pages: int


def layout_of(page_bytes: int, layers: int) -> KvLayout:
    """Return a layout with pages of this size; raises ValueError when they hold no whole tokens."""
    if page_bytes < 2 * PAGE_TOKENS or page_bytes % (2 * PAGE_TOKENS):
        raise ValueError(f"a page must be a multiple of {2 * PAGE_TOKENS} bytes, got {page_bytes}")
    head_dim = page_bytes // (2 * PAGE_TOKENS)
    heads = next(heads for heads in (8, 4, 2, 1) if head_dim % heads == 0)
    return KvLayout(layers=layers, kv_heads=heads, head_dim=head_dim // heads, page_tokens=PAGE_TOKENS, dtype="uint8")


async def stream_layers(
    pool: KvPool, offer: KvOffer, source_pages: Pages, *, chunks: int = 1, together: bool = False
) -> StreamRun:
    """Push each layer of each chunk, all of it computed already, then wait for all of it.

    Args:
        pool: of the source.
        offer: of the target.
        source_pages: as many pages as the offer has.
        chunks: parts of the prompt, of equally many pages but for the last ones.
        together: push all layers of a chunk in one call.

    Cancellation: drains what is posted.
    """
    layers, ends = range(pool.layout.layers), [end * PAGE_TOKENS for _, end in _parts(len(source_pages), chunks)]
    started = time.monotonic_ns()
    async with open_stream(pool.fabric, pool, offer, source_pages) as stream:
        cpu = time.thread_time_ns()
        for end in ends:
            if together:
                stream.push_layers(layers, end)
            else:
                for layer in layers:
                    stream.push(layer, end)
        cpu = time.thread_time_ns() - cpu
        posted = time.monotonic_ns()
        await stream.finish()
        finished = time.monotonic_ns()
    pushes = len(ends) * (1 if together else len(layers))
    pages = len(source_pages) * len(layers)
    return StreamRun(started, finished, (posted - started) / 1e9, cpu / 1e9, pushes, pages)


async def write_layers(pool: KvPool, offer: KvOffer, source_pages: Pages, *, chunks: int = 1) -> StreamRun:
    """Write the same pages with a bare `write_pages` for each layer of each chunk, from lists that are there already.

    Cancellation: cancels what is posted.
    """
    fabric, layout = pool.fabric, pool.layout
    key = RegionKey.from_bytes(offer.pages_key)
    targets = offer.block_table()
    source_step, target_step = layout.layer_bytes(pool.pages), layout.layer_bytes(offer.pool_pages)
    lists = [(source_pages[begin:end], targets[begin:end]) for begin, end in _parts(len(source_pages), chunks)]
    transfers: list[Transfer] = []
    started, cpu = time.monotonic_ns(), time.thread_time_ns()
    for source_list, target_list in lists:
        for layer in range(layout.layers):
            transfers.append(
                fabric.write_pages(
                    pool.region,
                    source_list,
                    key,
                    target_list,
                    page_bytes=layout.page_bytes,
                    source_offset=layer * source_step,
                    target_offset=layer * target_step,
                    imm=offer.imm_of(layer),
                )
            )
    cpu = time.thread_time_ns() - cpu
    posted = time.monotonic_ns()
    await wait_all(transfers)
    finished = time.monotonic_ns()
    pages = len(source_pages) * layout.layers
    return StreamRun(started, finished, (posted - started) / 1e9, cpu / 1e9, len(transfers), pages)


def _parts(pages: int, chunks: int) -> list[tuple[int, int]]:
    """Return (first page, end) of each chunk; no chunk is empty."""
    ends = sorted({-(-pages * chunk // chunks) for chunk in range(1, chunks + 1)})
    return list(zip([0, *ends], ends, strict=False))
