"""open_pool: memory for a pool, its key revoker beside it, and the end of both.

Runs on the event loop's thread.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from asyncfabric import Fabric, Region
from asyncfabric._groups import beside
from asyncfabric.kv.layout import KvLayout
from asyncfabric.kv.ledger import PageLedger
from asyncfabric.kv.pool import KvPool


@asynccontextmanager
async def open_pool(
    fabric: Fabric,
    layout: KvLayout,
    *,
    pages: int,
    contexts: int = 0,
    buffer: object = None,
    device: str | int = "cpu",
    seed: int | None = None,
) -> AsyncIterator[KvPool]:
    """Open a pool: allocate, or register the caller's memory; released on leaving, which ends all writers too.

    Args:
        fabric: whose memory it is.
        layout: of this rank.
        pages: pages of one layer.
        contexts: context slots, as many as requests may wait at once.
        buffer: memory of the caller, `layout.pool_bytes(pages)` bytes: tensor, array ...; None allocates on `device`.
        device: where to allocate.
        seed: shuffles the order in which pages are handed out; None hands them out from 0.

    Raises:
        ValueError: no pages, a buffer of another length, or contexts without `layout.context_bytes`.
        DeviceError: the memory cannot be had.

    Cancellation: shielded while memory is released; then it goes on.
    """
    if pages < 1 or contexts < 0:
        raise ValueError(f"a pool needs pages >= 1 and contexts >= 0, got {pages} and {contexts}")
    if contexts and not layout.context_bytes:
        raise ValueError("contexts need layout.context_bytes, which is 0")
    length = layout.pool_bytes(pages)
    regions: list[Region] = []
    try:
        if buffer is None:
            regions.append(await fabric.allocate(length, device))
        else:
            regions.append(await fabric.register(buffer))
            if regions[0].length != length:
                raise ValueError(f"the buffer has {regions[0].length} bytes, {pages} pages need {length}")
        if contexts:
            regions.append(await fabric.allocate(contexts * layout.context_bytes))
        order = None if seed is None else random.Random(seed).sample(range(pages), pages)
        context_region = regions[1] if contexts else None
        pool = KvPool(fabric, layout, pages, regions[0], context_region, PageLedger(pages, contexts, order))
        async with beside() as tasks:
            tasks.start_soon(pool.revoker.guard, pool.fence)
            try:
                yield pool
            finally:
                pool._close()
        if owners := pool.owners():
            warnings.warn(f"a KvPool was closed while pages were leased: {owners}", ResourceWarning, stacklevel=2)
    finally:
        with anyio.CancelScope(shield=True):
            for region in regions:
                await region.release()
