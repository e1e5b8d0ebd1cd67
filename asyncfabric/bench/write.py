"""Write workloads: a window of writes in flight, single awaited writes, and a deep queue that nobody awaits.

Run on the event loop of the initiator, one of them in a thread without; each write carries an immediate, so that the
target can wait for all of them.
"""

from __future__ import annotations

import resource
import time
from collections import deque
from dataclasses import dataclass

from asyncfabric import BusyError, Fabric, Region, RegionKey, Transfer, blocking, wait_all

MAX_SLOTS = 4096
"""Distinct places that a workload walks round; slicing a region for each write would measure slicing."""


@dataclass(frozen=True, slots=True)
class WriteRun:
    """What one repeat did."""

    seconds: float
    samples_ns: list[int]


def slot_count(region_bytes: int, op_bytes: int) -> int:
    """Return how many places of `op_bytes` a workload walks round in a region; raises ValueError when none fits."""
    if not 1 <= op_bytes <= region_bytes:
        raise ValueError(f"a write of {op_bytes} bytes does not fit into a region of {region_bytes} bytes")
    return min(region_bytes // op_bytes, MAX_SLOTS)


async def write_window(
    fabric: Fabric, region: Region, key: RegionKey, *, op_bytes: int, window: int, count: int, imm: int | None
) -> WriteRun:
    """Write `count` times with at most `window` transfers in flight, awaited oldest first.

    Samples are the durations from submission to completion that the engine reports.

    Cancellation: leaves the submitted writes to the fabric, which drains them.
    """
    slots = slot_count(region.length, op_bytes)
    sources = [region[slot * op_bytes : (slot + 1) * op_bytes] for slot in range(min(slots, count))]
    flight: deque[Transfer] = deque()
    samples: list[int] = []
    started = time.perf_counter_ns()
    for index in range(count):
        if len(flight) == window:
            samples.append(round((await flight.popleft()).duration * 1e9))
        slot = index % slots
        flight.append(fabric.write(sources[slot], key, slot * op_bytes, imm=imm))
    while flight:
        samples.append(round((await flight.popleft()).duration * 1e9))
    return WriteRun((time.perf_counter_ns() - started) / 1e9, samples)


async def write_single(
    fabric: Fabric, region: Region, key: RegionKey, *, op_bytes: int, count: int, imm: int | None
) -> WriteRun:
    """Write and await `count` times, one after the other; samples are what the calling task sees, call to return.

    Cancellation: leaves the submitted write to the fabric, which drains it.
    """
    slots = slot_count(region.length, op_bytes)
    sources = [region[slot * op_bytes : (slot + 1) * op_bytes] for slot in range(min(slots, count))]
    samples: list[int] = []
    started = before = time.perf_counter_ns()
    for index in range(count):
        slot = index % slots
        await fabric.write(sources[slot], key, slot * op_bytes, imm=imm)
        now = time.perf_counter_ns()
        samples.append(now - before)
        before = now
    return WriteRun((before - started) / 1e9, samples)


def write_blocking(
    fabric: blocking.Fabric, source: blocking.Region, key: RegionKey, *, op_bytes: int, count: int, imm: int | None
) -> WriteRun:
    """Do what `write_single` does in a thread without an event loop: submit and wait, one write after the other."""
    slots = slot_count(source.length, op_bytes)
    sources = [source[slot * op_bytes : (slot + 1) * op_bytes] for slot in range(min(slots, count))]
    samples: list[int] = []
    started = before = time.perf_counter_ns()
    for index in range(count):
        slot = index % slots
        fabric.write(sources[slot], key, slot * op_bytes, imm=imm).wait()
        now = time.perf_counter_ns()
        samples.append(now - before)
        before = now
    return WriteRun((before - started) / 1e9, samples)


async def write_together(
    fabric: Fabric, region: Region, key: RegionKey, *, op_bytes: int, count: int, imm: int | None
) -> WriteRun:
    """Submit `count` writes, then await all of them; the one sample lasts from the first call to the last return.

    Cancellation: leaves the submitted writes to the fabric, which drains them.
    """
    slots = slot_count(region.length, op_bytes)
    sources = [region[slot * op_bytes : (slot + 1) * op_bytes] for slot in range(min(slots, count))]
    started = time.perf_counter_ns()
    transfers = [
        fabric.write(sources[index % slots], key, (index % slots) * op_bytes, imm=imm) for index in range(count)
    ]
    await wait_all(transfers)
    elapsed = time.perf_counter_ns() - started
    return WriteRun(elapsed / 1e9, [elapsed])


@dataclass(frozen=True, slots=True)
class UnawaitedRun:
    """What one round of unawaited writes did. `resident_bytes` is the size of the process after the round."""

    seconds: float
    submit_seconds: float
    resident_bytes: int


async def write_unawaited(
    fabric: Fabric, region: Region, key: RegionKey, *, op_bytes: int, count: int, imm: int | None
) -> UnawaitedRun:
    """Submit `count` writes without awaiting any, then wait until the fabric has drained them.

    Cancellation: leaves the submitted writes to the fabric, which drains them.
    """
    slots = slot_count(region.length, op_bytes)
    sources = [region[slot * op_bytes : (slot + 1) * op_bytes] for slot in range(min(slots, count))]
    started = time.perf_counter_ns()
    last: Transfer | None = None
    for index in range(count):
        slot = index % slots
        while True:
            try:
                last = fabric.write(sources[slot], key, slot * op_bytes, imm=imm)
                break
            except BusyError:
                await fabric.wait_writable()
    submitted = time.perf_counter_ns()
    if last is not None:
        await last
    elapsed = time.perf_counter_ns() - started
    return UnawaitedRun(elapsed / 1e9, (submitted - started) / 1e9, resident_bytes())


def resident_bytes() -> int:
    """Return how much memory this process holds now."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
