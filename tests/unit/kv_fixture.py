"""A leaseholder and the ranks of a source in one process, with known bytes: what tests of streams are written in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np
import pytest
from fabrics import open_fake

import asyncfabric as af
from asyncfabric.kv import (
    KvInbox,
    KvJob,
    KvLayout,
    KvOutbox,
    KvPool,
    deliver,
    open_inbox,
    open_kv_channel,
    open_outbox,
    open_pool,
)
from asyncfabric.testing import FakeNetwork

SHAPE: dict[str, Any] = {"layers": 3, "kv_heads": 2, "head_dim": 4, "page_tokens": 4, "dtype": "float16"}
PATIENCE_S = 20.0


@dataclass
class Source:
    fabric: af.Fabric
    pool: KvPool
    outbox: KvOutbox


@dataclass
class KvFixture:
    """One leaseholder and the ranks of a source; `handler` is what the ranks do with an offer."""

    target: af.Fabric
    pool: KvPool
    inbox: KvInbox
    sources: list[Source] = field(default_factory=list)
    channels: list[Any] = field(default_factory=list)

    @property
    def addresses(self) -> list[af.FabricAddress]:
        return [source.fabric.address for source in self.sources]

    @property
    def layout(self) -> KvLayout:
        return self.sources[0].pool.layout


def content_of(layout: KvLayout, tokens: int) -> np.ndarray[Any, Any]:
    """The whole model's cache: [layer][plane][head][token][bytes]."""
    shape = (layout.layers, layout.planes, layout.kv_heads, tokens, layout.head_dim * layout.itemsize)
    return np.random.default_rng(3).integers(1, 256, size=shape, dtype=np.uint8)


def rows(layout: KvLayout, page: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A page as [plane][head][token][bytes]."""
    row = layout.head_dim * layout.itemsize
    if layout.order == "NHD":
        return page.reshape(2, layout.page_tokens, layout.local_heads, row).swapaxes(1, 2)
    return page.reshape(layout.planes, layout.local_heads, layout.page_tokens, row)


def fill(pool: KvPool, pages: Any, whole: np.ndarray[Any, Any], layer: int) -> None:
    layout = pool.layout
    for token in range(whole.shape[3]):
        page, slot = divmod(token, layout.page_tokens)
        view = rows(layout, pool.page(layer, int(pages[page])))
        view[:, :, slot] = whole[layer, :, layout.heads.start : layout.heads.stop, token]


def holds(pool: KvPool, pages: Any, whole: np.ndarray[Any, Any]) -> bool:
    layout = pool.layout
    for layer in range(layout.layers):
        for token in range(whole.shape[3]):
            page, slot = divmod(token, layout.page_tokens)
            view = rows(layout, pool.page(layer, int(pages[page])))
            if not np.array_equal(view[:, :, slot], whole[layer, :, layout.heads.start : layout.heads.stop, token]):
                return False
    return True


async def prefill(source: Source, job: KvJob, chunk: int = 5) -> None:
    """Compute the model's cache chunk by chunk, pushing each layer, then the context."""
    tokens, pool = job.offer.tokens, source.pool
    whole = content_of(pool.layout, tokens)
    context = bool(pool.layout.context_bytes)
    async with (
        await pool.lease("prefill", tokens=tokens, context=context) as lease,
        job.open_stream(lease.pages) as stream,
    ):
        for end in [*range(chunk, tokens, chunk), tokens]:
            for layer in range(pool.layout.layers):
                fill(pool, lease.pages, whole, layer)
                stream.push(layer, end)
            await anyio.lowlevel.checkpoint()
        if context:
            lease.context.memory[:] = bytes([7]) * pool.layout.context_bytes
        await stream.finish(lease.context if context else None)


def opening_of(engine: str) -> Callable[[], Any]:
    """Return how to open fabrics of one network, on the fake engine or the native one."""
    if engine == "fake":
        network = FakeNetwork()
        return lambda: open_fake(network)
    pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")
    return af.open_fabric


@asynccontextmanager
async def streaming(
    opening: Callable[[], Any],
    source_layout: KvLayout,
    target_layout: KvLayout,
    handler: Any = prefill,
    confirm_s: float = 5.0,
    pages: int = 64,
    open_channel: Callable[[af.Fabric], Any] = open_kv_channel,
) -> AsyncIterator[KvFixture]:
    contexts = 4 if target_layout.context_bytes else 0
    with anyio.fail_after(PATIENCE_S):
        async with AsyncExitStack() as stack:

            async def pool_of(layout: KvLayout, seed: int) -> tuple[af.Fabric, KvPool]:
                fabric = await stack.enter_async_context(opening())
                opened = open_pool(fabric, layout, pages=pages, contexts=contexts, seed=seed)
                return fabric, await stack.enter_async_context(opened)

            target, pool = await pool_of(target_layout, 1)
            homes = [await pool_of(source_layout.at_rank(rank), rank + 2) for rank in range(source_layout.tp_size)]
            fabrics = [target, *(fabric for fabric, _ in homes)]
            channels = [await stack.enter_async_context(open_channel(fabric)) for fabric in fabrics]
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(tasks.cancel_scope.cancel)
            channel = channels[0]
            inbox = await stack.enter_async_context(open_inbox(target, pool, channel, confirm_s=confirm_s))
            tasks.start_soon(deliver, channel, [inbox])
            found = KvFixture(target, pool, inbox, channels=channels)
            for (fabric, own), own_channel in zip(homes, channels[1:], strict=True):
                source = Source(fabric, own, None)  # type: ignore[arg-type]  # known in a moment

                async def serve(job: KvJob, source: Source = source) -> None:
                    await handler(source, job)

                source.outbox = await stack.enter_async_context(open_outbox(fabric, own, own_channel, serve))
                tasks.start_soon(deliver, own_channel, [source.outbox])
                found.sources.append(source)
            yield found


async def idle(found: KvFixture) -> None:
    """Return when no source serves anything and every page is back."""
    for source in found.sources:
        await source.outbox.drained()
    for pool in (found.pool, *(source.pool for source in found.sources)):
        report = pool.report()
        assert report.free == report.pages and report.quarantined == 0, report
