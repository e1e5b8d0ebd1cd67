"""Writing runs: many equal stretches of one region to one receiver, as the engine likes them best.

Runs on the event loop's thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncfabric import Fabric, Region, RegionKey, Transfer
from asyncfabric.weights.boxes import Ints

MOST_PAGES = 32768
"""Pages of one call."""

LONG_RUN_BYTES = 8 << 20
"""Runs from here on are written one by one: a call is nothing beside them, and rails may split them."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Where a receiver wants a version: its key, the counter for what this sender writes, what is worth a word."""

    key: RegionKey
    imm: int
    share_bytes: int = 0


def write_runs(
    fabric: Fabric, region: Region, sources: Ints, gate: Gate, targets: Ints, run_bytes: int, after: object = None
) -> Transfer:
    """Write runs from byte offsets of a region to byte offsets behind a key; each counts one arrival.

    `after` is a stream of the region's GPU that the bytes are read after.

    Runs of LONG_RUN_BYTES and more come one at a time. Raises what `Fabric.write_pages` raises.
    """
    if len(sources) == 1:
        begin = int(sources[0])
        return fabric.write(region[begin : begin + run_bytes], gate.key, int(targets[0]), gate.imm, after=after)
    return fabric.write_pages(
        region,
        sources,
        gate.key,
        targets,
        page_bytes=run_bytes,
        source_stride=1,
        target_stride=1,
        imm=gate.imm,
        after=after,
    )
