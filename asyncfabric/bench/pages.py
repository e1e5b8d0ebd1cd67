"""Page workloads: a list of scattered pages in one call, and how long that call keeps the event loop.

Run on the event loop of the initiator.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from asyncfabric import Fabric, Region, RegionKey
from asyncfabric.bench.pattern import Pages


@dataclass(frozen=True, slots=True)
class PagesRun:
    """What one call did: seconds from call to completion, and the part of it that kept the calling thread."""

    seconds: float
    call_seconds: float


async def write_page_list(
    fabric: Fabric,
    region: Region,
    key: RegionKey,
    source_pages: Pages,
    target_pages: Pages,
    *,
    page_bytes: int,
    imm: int | None,
) -> PagesRun:
    """Write the pages of one list in one call and await it.

    Cancellation: leaves the submitted pages to the fabric, which drains them.
    """
    started = time.perf_counter_ns()
    transfer = fabric.write_pages(
        region,
        source_pages,
        key,
        target_pages,
        page_bytes=page_bytes,
        source_stride=page_bytes,
        target_stride=page_bytes,
        imm=imm,
    )
    called = time.perf_counter_ns()
    await transfer
    ended = time.perf_counter_ns()
    return PagesRun((ended - started) / 1e9, (called - started) / 1e9)
