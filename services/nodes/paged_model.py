"""A model over pages of the fabric: what prefill and decode nodes open alike. On the event loop; loads on a thread.

The runner computes in place: its pool is a view of the KvPool's registered memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch
import trio
from prometheus_client import CollectorRegistry

from asyncfabric import Fabric, InternalError
from asyncfabric.kv import KvLayout, KvLease, KvPool, open_pool
from asyncfabric.observe.metrics import FabricCollector
from asyncfabric_services.health.metrics import gauge
from asyncfabric_services.nodes.prefix_cache import PrefixCache
from asyncfabric_services.nodes.rails import open_rails
from asyncfabric_services.nodes.stage import Stage
from asyncfabric_services.router.local_service import load_named, pages_of
from asyncfabric_services.router.server import StartError
from asyncfabric_services.runner.model import LoadedModel
from asyncfabric_services.runner.runner import Runner

LOGIT = torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class PagedModel:
    """A loaded model, its fabric, its pool, the runner between them, and the prompts that stay in the pool's pages."""

    loaded: LoadedModel
    fabric: Fabric
    pool: KvPool
    runner: Runner
    prefixes: PrefixCache


class PoolSupply:
    """Pages of a KvPool for a scheduler, as its PageSupply."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._leases: dict[tuple[int, ...], KvLease] = {}

    @property
    def pages(self) -> int:
        """Return how many pages there are in all."""
        return self._pool.pages

    @property
    def free(self) -> int:
        """Return how many pages can be leased now."""
        return self._pool.report().free

    def lease(self, count: int) -> list[int]:
        """Take `count` pages; raises BusyError when fewer are free."""
        lease = self._pool.lease_nowait("the scheduler", pages=count)
        pages: list[int] = lease.pages.tolist()
        self._leases[tuple(pages)] = lease
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Give back what one `lease` returned."""
        lease = self._leases.pop(tuple(pages), None)
        if lease is None:
            raise InternalError("pages were released that were not leased here")
        lease.release()


def layout_of(loaded: LoadedModel) -> KvLayout:
    """Return how the pages of a model lie; the context is the logits of the first token of the answer."""
    shape = loaded.shape
    return KvLayout(
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        page_tokens=shape.page_tokens,
        dtype=shape.dtype,
        context_bytes=loaded.tokenizer.vocabulary * LOGIT,
        model=loaded.weights,
    )


@asynccontextmanager
async def open_paged_model(stage: Stage) -> AsyncIterator[PagedModel]:
    """Load the model of the settings, open the fabric and the pool.

    Raises StartError when the model cannot be loaded or run, has no page, or the rails cannot be opened.

    Cancellation: loading cannot be interrupted; the rest closes in order.
    """
    settings = stage.settings
    torch.set_num_threads(settings.model.threads)
    loaded = await trio.to_thread.run_sync(load_named, settings)
    pages = pages_of(settings, loaded)
    contexts = settings.batch.most_running + settings.batch.most_waiting
    async with (
        open_rails(settings, stage.secret) as fabric,
        open_pool(fabric, layout_of(loaded), pages=pages, contexts=contexts) as pool,
    ):
        FabricCollector(fabric, stage.registry)
        prefixes = PrefixCache(pool, keeps=settings.cache.prefixes == "keep")
        _measure(pool, prefixes, stage.registry)
        try:
            runner = await trio.to_thread.run_sync(Runner, loaded, pool.tensor())
        except ValueError as error:
            raise StartError(f"the model cannot be run: {error}") from error
        try:
            yield PagedModel(loaded, fabric, pool, runner, prefixes)
        finally:
            prefixes.clear()


def _measure(pool: KvPool, prefixes: PrefixCache, registry: CollectorRegistry) -> None:
    free = gauge(registry, "kv_free", "pages", "Pages that can be leased.")
    held = gauge(registry, "kv_held", "pages", "Pages that requests hold.")
    quarantined = gauge(registry, "kv_quarantined", "pages", "Pages that wait for proof that nobody writes to them.")
    kept = gauge(registry, "kv_prefix", "pages", "Of the free pages, those that keep the beginning of prompts.")
    free.set_function(lambda: pool.report().free + prefixes.idle)
    held.set_function(lambda: pool.report().held - prefixes.idle)
    kept.set_function(lambda: prefixes.idle)
    quarantined.set_function(lambda: pool.report().quarantined)
