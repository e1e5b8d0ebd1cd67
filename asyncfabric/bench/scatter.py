"""Scatter workload: one call that reaches many targets, each with its own key, offsets and odd length.

Runs on the event loop of the initiator.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from asyncfabric import Fabric, Region, ScatterTarget


async def scatter_rounds(
    fabric: Fabric, region: Region, targets: Sequence[ScatterTarget], *, count: int, imm: int | None
) -> list[int]:
    """Scatter to all targets and await it, `count` times; return nanoseconds from call to completion for each.

    Cancellation: leaves the submitted scatter to the fabric, which drains it.
    """
    samples = []
    for _ in range(count):
        before = time.perf_counter_ns()
        await fabric.scatter(region, targets, imm=imm)
        samples.append(time.perf_counter_ns() - before)
    return samples
