"""What dispatch and combine among GPUs take, beside the wire and beside NCCL, in one run; prints lines and writes JSON.

Usage: python tests/gpu/nvlink_figures.py OUT.json. A process for each GPU of the machine. Times are of CUDA events:
launches are queued behind a sleeping kernel, so that the GPU goes from one to the next. Results are checked before and
after timing.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import torch
import torch.distributed as dist
import torch.multiprocessing
from nvlink_scene import expected, run_experts, same_bits, tokens_of

import asyncfabric as af
from asyncfabric.moe import MoeConfig, MoeGroup
from asyncfabric.moe.nvlink import CudaMoeExchange, open_moe_cuda

ROUNDS, BATCHES, SETS = 60, 4, 12
SLEEP_CYCLES = 120_000_000
BASE: dict[str, Any] = {"num_experts": 256, "top_k": 8, "hidden": 7168, "buffer_limit_bytes": 1 << 36}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("decode 128, fp8", {"max_tokens": 128, "in_dtype": "float8_e4m3fn", "scale_block": 128}),
    ("decode 128, bf16", {"max_tokens": 128}),
    ("prefill 4096, fp8", {"max_tokens": 4096, "in_flight": 1, "in_dtype": "float8_e4m3fn", "scale_block": 128}),
    ("prefill 4096, bf16", {"max_tokens": 4096, "in_flight": 1}),
]


def timed(bodies: dict[str, Callable[[int], None]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Return microseconds of each body of each round, done in turn."""
    found: dict[str, list[float]] = {name: [] for name in bodies}
    for batch in range(BATCHES + 1):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(SLEEP_CYCLES)
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(len(bodies) + 1)] for _ in range(rounds)]
        for number, events in enumerate(marks):
            events[0].record()
            for body, event in zip(bodies.values(), events[1:], strict=True):
                body(batch * rounds + number)
                event.record()
        torch.cuda.synchronize()
        if batch == 0:
            continue
        for events in marks[2:]:
            for name, begin, end in zip(bodies, events, events[1:], strict=False):
                found[name].append(begin.elapsed_time(end) * 1e3)
    return found


def told(case: str, name: str, mine: list[float], floors: tuple[float, float] | None = None) -> dict[str, Any]:
    """Gather the samples of all ranks; returns and, on rank 0, prints what they say."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    pooled = sorted(sample for each in everyone for sample in each)
    slowest = sorted(max(each) for each in zip(*everyone, strict=True))
    row = {
        "case": case,
        "name": name,
        "p50": statistics.median(pooled),
        "p99": pooled[int(len(pooled) * 0.99)],
        "slowest_p50": statistics.median(slowest),
        "slowest_p99": slowest[int(len(slowest) * 0.99)],
        "wire": floors[0] if floors else None,
        "memory": floors[1] if floors else None,
        "samples": len(pooled),
    }
    if dist.get_rank() == 0:
        tail = f"  floors: wire {floors[0]:.1f}, memory {floors[1]:.1f}" if floors else ""
        print(
            f"{case:20s} {name:16s} p50 {row['p50']:8.1f} p99 {row['p99']:8.1f} us; slowest rank p50 "
            f"{row['slowest_p50']:8.1f} p99 {row['slowest_p99']:8.1f}{tail}",
            flush=True,
        )
    return row


def wire_rate() -> float:
    """Return bytes per microsecond of a copy to the next GPU while all GPUs do the same; 0 where there is one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return 0.0
    here = torch.empty(256 << 20, dtype=torch.uint8, device=f"cuda:{rank}").random_()
    there = torch.empty_like(here, device=f"cuda:{(rank + 1) % world}")
    return here.nbytes / statistics.median(
        timed({"copy": lambda _: void(there.copy_(here, non_blocking=True))}, 8)["copy"]
    )


def memory_rate() -> float:
    """Return bytes per microsecond that a copy inside the GPU reads and writes."""
    here = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    there = torch.empty_like(here)
    samples = timed({"copy": lambda _: void(there.copy_(here, non_blocking=True))}, rounds=8)
    return 2 * here.nbytes / statistics.median(samples["copy"])


def floors_of(config: MoeConfig, moved: float, rates: tuple[float, float]) -> dict[str, tuple[float, float] | None]:
    """Return the least that each half can take, by the wire and by memory, when routes are even.

    Args:
        config: the shape.
        moved: rows that leave a GPU, and as many that come.
        rates: bytes of the wire and of memory in a microsecond.
    """
    if not rates[0]:
        return {"dispatch": None, "combine": None, "both": None}
    row = config.hidden * config.in_torch.itemsize + 4 * config.scales
    back = config.hidden * config.out_torch.itemsize
    rows, own = config.max_tokens * config.top_k, config.max_tokens
    # Own tokens are read, what comes is written and read, each row is written; back, each row is read.
    there_memory = (own + 2 * moved + rows) * row
    back_memory = (rows + 2 * moved + own) * back
    there = (moved * row / rates[0], there_memory / rates[1])
    again = (moved * back / rates[0], back_memory / rates[1])
    return {"dispatch": there, "combine": again, "both": (there[0] + again[0], there[1] + again[1])}


def void(_: object) -> None:
    """Return nothing."""


async def timed_apart(bodies: dict[str, Callable[[int], None]], rounds: int) -> dict[str, list[float]]:
    """Return microseconds of each body of each round, where a proxy needs the event loop while the GPU works.

    The GPUs meet before each round; its launches are queued behind that.
    """
    found: dict[str, list[float]] = {name: [] for name in bodies}
    met = torch.ones(1, device="cuda")
    for number in range(rounds + 5):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(bodies) + 1)]
        torch.cuda._sleep(800_000)
        dist.all_reduce(met)
        events[0].record()
        for body, event in zip(bodies.values(), events[1:], strict=True):
            body(number)
            event.record()
        await anyio.to_thread.run_sync(torch.cuda.synchronize)
        for name, begin, end in zip(bodies, events, events[1:], strict=False):
            if number >= 5:
                found[name].append(begin.elapsed_time(end) * 1e3)
    return found


async def exchange(
    case: str, shape: dict[str, Any], fabric: af.Fabric, rates: tuple[float, float], hosts: list[int] | None = None
) -> list[dict[str, Any]]:
    """Check, time, check again; `rates`: bytes of the wire and of memory in a microsecond."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = MoeConfig(**(BASE | shape | {"ranks": world}))
    addresses: list[Any] = [None] * world
    dist.all_gather_object(addresses, bytes(fabric.address))
    group = MoeGroup(rank, [af.FabricAddress.from_bytes(each) for each in addresses], tag=case)
    rows: list[dict[str, Any]] = []
    async with open_moe_cuda(fabric, group, config, device=f"cuda:{rank}", hosts=hosts) as moe:
        tokens = [tokens_of(config, rank, seed, config.max_tokens, masked=0) for seed in range(SETS)]
        if config.max_tokens > 512:
            tokens = tokens[:4]
        given = [each.on(moe.device) for each in tokens]
        out = torch.empty(config.max_tokens, config.hidden, dtype=torch.bfloat16, device=moe.device)
        outputs = torch.randn(
            moe._site.layout.row_capacity(rank), config.hidden, device=moe.device, dtype=torch.bfloat16
        )
        handles: list[Any] = [None]

        async def right() -> None:
            for each, on_gpu in list(zip(tokens, given, strict=True))[:2]:
                handle = moe.dispatch(*on_gpu)
                await moe.settled()
                result = moe.combine(run_experts(moe, handle), handle)
                await moe.settled()
                some = slice(0, min(128, config.max_tokens))
                part = type(each)(*(None if tensor is None else tensor[some] for tensor in each))
                assert same_bits(result[some], expected(config, rank, part)), f"{case}: wrong on rank {rank}"

        def dispatch(number: int) -> None:
            handles[0] = moe.dispatch(*given[number % len(given)])

        def combine(number: int) -> None:
            moe.combine(outputs, handles[0], out=out)

        await right()
        sent = [copies(config, moe, each.indices) for each in tokens]
        floors = floors_of(config, statistics.mean(sent), rates)
        bodies = {"dispatch": dispatch, "combine": combine}
        samples = timed(bodies) if hosts is None else await timed_apart(bodies, 200 if config.max_tokens <= 512 else 40)
        samples["both"] = [sum(each) for each in zip(samples["dispatch"], samples["combine"], strict=True)]
        rows += [told(case, name, found, floors[name]) for name, found in samples.items()]
        await right()
    return rows


def copies(config: MoeConfig, moe: CudaMoeExchange, indices: torch.Tensor) -> int:
    """How many rows leave this GPU."""
    each = -(-config.num_experts // config.ranks)
    owner = torch.where(indices >= 0, indices // each, -1)
    return sum(int((owner == rank).any(dim=1).sum()) for rank in range(config.ranks) if rank != moe.rank)


def nccl(case: str, tokens: int) -> dict[str, Any]:
    """Time NCCL's all-to-all of tokens x top-8 rows of bf16: what an exchange without our routing would pad to."""
    world = dist.get_world_size()
    here = torch.randn(tokens * 8 // world * world, 7168, device="cuda").to(torch.bfloat16)
    there = torch.empty_like(here)
    dist.all_to_all_single(there, here)
    samples = timed({"all_to_all": lambda _: void(dist.all_to_all_single(there, here))})
    return told(case, f"nccl {here.nbytes / 1e6:.1f} MB", samples["all_to_all"])


def main(rank: int, world: int, path: str, meeting: str) -> None:
    """One rank."""
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{meeting}", rank=rank, world_size=world)
    torch.cuda._sleep(1000)

    async def body() -> list[dict[str, Any]]:
        rates = wire_rate(), memory_rate()
        nothing = timed({"nothing": lambda _: torch.cuda._sleep(1)})["nothing"]
        rows = [told("an empty kernel", "between events", nothing)]
        if rank == 0:
            wire, memory = (rate / 1e3 for rate in rates)
            print(f"{world} x {torch.cuda.get_device_name(0)}; all at once: wire {wire:.1f}, memory {memory:.1f} GB/s")
        async with af.open_fabric(af.FabricConfig(rails=("local",))) as fabric:
            for case, shape in CASES:
                rows += await exchange(case, shape, fabric, rates)
        for rail in ("local", "tcp") if world > 1 else ():
            try:
                opened = af.open_fabric(af.FabricConfig(rails=(rail,)))
                async with opened as fabric:
                    for case, shape in CASES:
                        private = {"private_tokens": shape["max_tokens"]}
                        rows += await exchange(f"{rail}: {case}", shape, fabric, rates, list(range(world)))
                        rows += await exchange(
                            f"{rail}: {case}, all private", shape | private, fabric, rates, list(range(world))
                        )
            except af.DeviceError as error:
                print(f"{rail}: LEFT OUT: {error}", flush=True)
        if world > 1:
            rows += [nccl("decode 128", 128), nccl("prefill 4096", 4096)]
        return rows

    rows = anyio.run(body, backend="trio")
    if rank == 0:
        Path(path).write_text(json.dumps({"gpus": world, "gpu": torch.cuda.get_device_name(0), "rows": rows}, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    world = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(main, (world, sys.argv[1], f"{folder}/meeting"), nprocs=world)
