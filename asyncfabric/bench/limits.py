"""The ceilings of this machine, each as one repeat of a bare loop: seconds in, nothing else.

Blocking: the loops release the GIL and are meant for processes that have nothing else to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from asyncfabric.bench.pattern import Bytes, Pages

CopyLimit = Literal["memcpy", "memcpy_nt"]
COPY_LIMITS: tuple[CopyLimit, ...] = ("memcpy", "memcpy_nt")

NEAR_CORES_US = 0.45
"""Round trip of two spinning threads below which the cores are near; 0.15 and 0.6 to 1 us are the two modes seen."""


def copy_seconds(limit: CopyLimit, target: Bytes, source: Bytes, op_bytes: int, count: int) -> float:
    """Copy with one thread, walking round both regions."""
    from asyncfabric.bench import native_loops

    return float(native_loops.copy(target, source, op_bytes, count, limit == "memcpy_nt"))


def page_copy_seconds(
    limit: CopyLimit,
    target: Bytes,
    source: Bytes,
    target_pages: Pages,
    source_pages: Pages,
    page_bytes: int,
    rounds: int = 1,
) -> float:
    """Copy page by page over the same lists as `write_pages`."""
    from asyncfabric.bench import native_loops

    nt = limit == "memcpy_nt"
    return float(native_loops.copy_pages(target, source, target_pages, source_pages, page_bytes, rounds, nt))


def cma_seconds(pid: int, address: int, source: Bytes, op_bytes: int, count: int) -> float:
    """Write into another process with process_vm_writev; its region is as long as `source`."""
    from asyncfabric.bench import native_loops

    return float(native_loops.cma(pid, address, source, op_bytes, count))


def cma_page_seconds(
    pid: int, address: int, source: Bytes, target_pages: Pages, source_pages: Pages, page_bytes: int
) -> float:
    """Write a page list into another process with process_vm_writev."""
    from asyncfabric.bench import native_loops

    return float(native_loops.cma_pages(pid, address, source, target_pages, source_pages, page_bytes, 1))


def core_distance(count: int = 20_000) -> tuple[str, float]:
    """State whether two threads are near or far now: ("near" or "far", median round trip in us)."""
    from asyncfabric.bench import native_loops

    samples = np.empty(count, dtype=np.uint64)
    native_loops.spin_round_trips(samples)
    median_us = float(np.median(samples)) / 1e3
    return ("near" if median_us < NEAR_CORES_US else "far"), round(median_us, 3)


def repeat_count(one_repeat: Callable[[int], float], seconds: float, first: int = 4) -> int:
    """Return how many ops fill `seconds`, found by running ever longer repeats; these are the warm-up."""
    count = max(1, first)
    while True:
        elapsed = one_repeat(count)
        if elapsed >= seconds / 4:
            return max(1, round(count * seconds / elapsed))
        count = max(count * 2, round(count * min(16.0, seconds / 2 / max(elapsed, 1e-6))))
