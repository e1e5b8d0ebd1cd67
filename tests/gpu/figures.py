"""The figures of GPU transfers, each beside the limit measured in the same run; prints lines and writes JSON.

Usage: python tests/gpu/figures.py OUT.json [lists=kernel|batch|single] [lanes=N]. Two processes: this one writes, from
cuda:0, to one on the last GPU. On a machine with one GPU both share it, and the limit is a copy inside it.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import torch
from party import Party

import asyncfabric as af

MIB = 1 << 20
REPEATS = 5
OPTIONS = "&".join(sys.argv[2:])
RAIL = "cuda:0" + (f"?{OPTIONS}" if OPTIONS else "")
ROWS: list[dict[str, Any]] = []


def note(name: str, value: float, unit: str, limit: float | None = None, demanded: float | None = None) -> None:
    """Print and keep one figure; `limit` is what the bare driver did in this run."""
    share = value / limit if limit else None
    ROWS.append({"name": name, "value": value, "unit": unit, "limit": limit, "share": share, "demanded": demanded})
    tail = f"   limit {limit:8.1f}  share {share:.3f} (demanded {demanded})" if share is not None else ""
    print(f"{name:58s} {value:9.2f} {unit}{tail}", flush=True)


async def rate(body: Callable[[], Awaitable[int]]) -> float:
    """Return the median GB/s of several runs of a body that returns how many bytes it moved."""
    await body()
    found = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        moved = await body()
        found.append(moved / (time.perf_counter() - begin) / 1e9)
    return statistics.median(found)


async def copies(fabric: af.Fabric, peer: Party, far: int) -> float:
    """Measure whole writes; returns the rate of the largest."""
    top = 0.0
    big = await fabric.allocate(1024 * MIB, device="cuda:0")
    near = torch.empty(1024 * MIB, dtype=torch.uint8, device="cuda:0")
    there = torch.empty(1024 * MIB, dtype=torch.uint8, device=f"cuda:{far}")
    for size, count, demanded in ((16, 32, 0.9), (256, 8, 0.95), (1024, 4, 0.95)):

        async def plain(size: int = size, count: int = count) -> int:
            for _ in range(count):
                there[: size * MIB].copy_(near[: size * MIB], non_blocking=True)
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(far)
            return size * MIB * count

        async def ours(size: int = size, count: int = count) -> int:
            transfers = [fabric.write(big[: size * MIB], peer.key, 0, imm=peer.imm) for _ in range(count)]
            for transfer in transfers:
                await transfer
            return size * MIB * count

        async def plain_one(size: int = size, count: int = count) -> int:
            for _ in range(count):
                there[: size * MIB].copy_(near[: size * MIB], non_blocking=True)
                torch.cuda.synchronize(0)
            return size * MIB * count

        async def ours_one(size: int = size, count: int = count) -> int:
            for _ in range(count):
                await fabric.write(big[: size * MIB], peer.key, 0, imm=peer.imm)
            return size * MIB * count

        limit = await rate(plain)
        top = await rate(ours)
        note(f"write {size} MiB, {count} in flight", top, "GB/s", limit, demanded)
        note(
            f"write {size} MiB, one awaited after the other",
            await rate(ours_one),
            "GB/s",
            await rate(plain_one),
            demanded,
        )
    await big.release()
    return top


async def pages(fabric: af.Fabric, peer: Party, top: float) -> None:
    """Measure batches of random pages, and what one costs the event loop."""
    page = 32 * 1024
    big = await fabric.allocate(1024 * MIB, device="cuda:0")
    for count in (1024, 10_000):
        sources = torch.randperm(1024 * MIB // page)[:count]
        targets = torch.randperm(1024 * MIB // page)[:count]

        async def ours(sources: Any = sources, targets: Any = targets, count: int = count) -> int:
            await fabric.write_pages(big, sources, peer.key, targets, page_bytes=page, imm=peer.imm)
            return count * page

        async def window(sources: Any = sources, targets: Any = targets, count: int = count) -> int:
            moved = 0
            transfers = [
                fabric.write_pages(big, sources, peer.key, targets, page_bytes=page, imm=peer.imm) for _ in range(8)
            ]
            for transfer in transfers:
                await transfer
                moved += count * page
            return moved

        note(f"{count} random pages of 32 KiB, one batch", await rate(ours), "GB/s", top, 0.8)
        note(f"{count} random pages of 32 KiB, 8 batches in flight", await rate(window), "GB/s", top, 0.8)
        begin = time.perf_counter()
        transfer = fabric.write_pages(big, sources, peer.key, targets, page_bytes=page)
        note(f"the call for {count} pages", (time.perf_counter() - begin) * 1e6, "us")
        await transfer
    await big.release()


async def host(fabric: af.Fabric, peer: Party, host_peer: Party, far: int) -> None:
    """Measure pinned host memory to the peer's GPU, and our GPU to the peer's host memory."""
    size, count = 256 * MIB, 4
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    on_gpu = torch.empty(size, dtype=torch.uint8, device="cuda:0")
    up = await fabric.allocate(size)
    down = await fabric.allocate(size, device="cuda:0")

    async def plain_up() -> int:
        for _ in range(count):
            on_gpu.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize(0)
        return size * count

    async def plain_down() -> int:
        for _ in range(count):
            pinned.copy_(on_gpu, non_blocking=True)
        torch.cuda.synchronize(0)
        return size * count

    async def many(region: af.Region, key: af.RegionKey) -> int:
        for transfer in [fabric.write(region, key, 0) for _ in range(count)]:
            await transfer
        return size * count

    note(
        "host memory -> GPU of the peer, 256 MiB",
        await rate(lambda: many(up, peer.key)),
        "GB/s",
        await rate(plain_up),
        0.95,
    )
    note(
        "GPU -> host memory of the peer, 256 MiB",
        await rate(lambda: many(down, host_peer.key)),
        "GB/s",
        await rate(plain_down),
        0.95,
    )
    await up.release()
    await down.release()


def percentiles(name: str, samples: list[float], p50: float | None = None, p99: float | None = None) -> None:
    """Note p50 and p99 of microseconds, with what is demanded of them."""
    samples.sort()
    note(f"{name}, p50", samples[len(samples) // 2], "us", demanded=p50)
    note(f"{name}, p99", samples[int(len(samples) * 0.99)], "us", demanded=p99)


async def small(fabric: af.Fabric, peer: Party) -> None:
    """Measure one 4 KiB write, awaited."""
    region = await fabric.allocate(4096, device="cuda:0")
    samples = []
    for _ in range(2000):
        begin = time.perf_counter_ns()
        await fabric.write(region, peer.key, 0, imm=peer.imm)
        samples.append((time.perf_counter_ns() - begin) / 1e3)
    percentiles("one 4 KiB write, awaited", samples[200:])


async def words() -> None:
    """Measure kernel -> watch word -> task, and signal -> counter flag -> kernel, each with the way back in it."""
    from kernels import kernel, on_stream

    rounds = 3000
    program = kernel("wait_then_store")
    busy = af.FabricConfig(rails=("cuda:0",), polling="busy", spin_us=300)
    async with af.open_fabric(busy) as fabric, fabric.watch() as word, fabric.watch() as go:
        starter = ctypes.c_uint64.from_address(go.address)
        stream = torch.cuda.Stream()
        with on_stream(stream):
            program((1,), (1,), (go.address, 1, word.address, rounds))
        samples = []
        for number in range(1, rounds + 1):
            if number % 16 == 0:
                await anyio.lowlevel.checkpoint()
            begin = time.perf_counter_ns()
            starter.value = number
            async for _, new in word:
                if new >= number:
                    break
            samples.append((time.perf_counter_ns() - begin) / 1e3)
        stream.synchronize()
        percentiles("store -> kernel -> watch word -> Python task", samples[200:], 9.3, 20)

        # The same without a fabric: what the way to the GPU and back takes by itself.
        echo = torch.zeros(8, dtype=torch.int64, pin_memory=True)
        back = ctypes.c_uint64.from_address(echo.data_ptr())
        starter.value = 0
        with on_stream(stream):
            program((1,), (1,), (go.address, 1, echo.data_ptr(), rounds))
        samples = []
        for number in range(1, rounds + 1):
            begin = time.perf_counter_ns()
            starter.value = number
            while back.value < number:
                pass
            samples.append((time.perf_counter_ns() - begin) / 1e3)
        stream.synchronize()
        percentiles("store -> kernel -> word, bare loop in Python", samples[200:])

    async with af.open_fabric(busy) as writer, af.open_fabric(busy) as target, target.watch() as word:
        counter = target.counter()
        peer = await writer.connect(target.address)
        echo.zero_()
        with on_stream(stream):
            program((1,), (1,), (counter.flag_address, 1, echo.data_ptr(), rounds))
        samples = []
        for number in range(1, rounds + 1):
            begin = time.perf_counter_ns()
            transfer = writer.signal(peer, counter.imm)
            while back.value < number:
                pass
            samples.append((time.perf_counter_ns() - begin) / 1e3)
            await transfer
        stream.synchronize()
        percentiles("signal -> counter flag -> kernel -> word back", samples[200:], 6)


async def main() -> None:
    """Measure everything and write the file."""
    far = torch.cuda.device_count() - 1
    print(f"{torch.cuda.get_device_name(0)}, {far + 1} GPU(s), rail {RAIL}", flush=True)
    with Party(f"cuda:{far}", f"cuda:{far}", 1024 * MIB) as peer, Party(f"cuda:{far}", "cpu", 256 * MIB) as host_peer:
        async with af.open_fabric(af.FabricConfig(rails=(RAIL,), polling="busy", spin_us=300)) as fabric:
            print(fabric.rails[0].version, fabric.rails[0].library, flush=True)
            top = await copies(fabric, peer, far)
            await pages(fabric, peer, top)
            await host(fabric, peer, host_peer, far)
            await small(fabric, peer)
    if not OPTIONS:
        await words()


if __name__ == "__main__":
    anyio.run(main, backend="trio")
    found = {"gpus": torch.cuda.device_count(), "rail": RAIL, "rows": ROWS}
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1))
