"""Page workloads: lists of scattered pages, a call each, and how long that call keeps the event loop.

Run on the event loop of the initiator.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from asyncfabric import Fabric, Region, RegionKey, Transfer
from asyncfabric.bench.pattern import Pages


@dataclass(frozen=True, slots=True)
class PagesRun:
    """What the calls did: seconds from the first to the last completion, and how long one kept the calling thread."""

    seconds: float
    call_seconds: float


async def write_page_lists(
    fabric: Fabric,
    region: Region,
    key: RegionKey,
    lists: Sequence[tuple[Pages, Pages]],
    *,
    page_bytes: int,
    imm: int | None,
) -> PagesRun:
    """Write the pages of each (source pages, target pages) in a call of its own, all in flight, and await them.

    Cancellation: leaves the submitted pages to the fabric, which drains them.
    """
    started = time.perf_counter_ns()
    transfers = [
        fabric.write_pages(region, source_pages, key, target_pages, page_bytes=page_bytes, imm=imm)
        for source_pages, target_pages in lists
    ]
    return await _await_all(transfers, started)


async def read_page_lists(
    fabric: Fabric, region: Region, key: RegionKey, lists: Sequence[tuple[Pages, Pages]], *, page_bytes: int
) -> PagesRun:
    """Read the pages of each (source pages, target pages) in a call of its own, all in flight, and await them.

    Cancellation: leaves the submitted pages to the fabric, which drains them.
    """
    started = time.perf_counter_ns()
    transfers = [
        fabric.read_pages(key, source_pages, region, target_pages, page_bytes=page_bytes)
        for source_pages, target_pages in lists
    ]
    return await _await_all(transfers, started)


async def _await_all(transfers: Sequence[Transfer], started: int) -> PagesRun:
    called = time.perf_counter_ns()
    for transfer in transfers:
        await transfer
    ended = time.perf_counter_ns()
    return PagesRun((ended - started) / 1e9, (called - started) / len(transfers) / 1e9)
