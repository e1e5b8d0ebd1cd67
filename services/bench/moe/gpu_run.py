"""`bench moe --device cuda`: dispatch and combine among the GPUs of this machine, beside the wire, memory and NCCL.

The GPUs are one host's; with --apart each rank is as if on a host of its own, with --node-size so many as if on one,
and rows between hosts go by way of the fabric.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from asyncfabric.bench.measure import Rate, percentiles_us, significant
from asyncfabric.bench.rows import Point
from asyncfabric.moe import MoeConfig
from asyncfabric_services.bench.moe.gpu_counts import carried
from asyncfabric_services.bench.options import Options
from asyncfabric_services.bench.pair import Process, all_of, answers_of
from asyncfabric_services.bench.report.report import BenchReport

BATCHES, ROUNDS, MANY_ROUNDS, MANY_TOKENS = 4, 60, 20, 512
COUNTED_STEPS = 3
TOTALS = {"writes": "immediates_sent", "wire_bytes": "bytes_written"}
"""What engines count in all these steps, and their names for it."""
WORD_BYTES = 4


def run_moe_gpu(
    options: Options, report: BenchReport, shapes: list[dict[str, Any]], hosts: Sequence[int] | None
) -> None:
    """Measure each shape; `hosts`: of each rank, None: all are on one."""
    report.expect(len(shapes))
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        ranks = [
            stack.enter_context(Process("moe-gpu", f"rank {rank}", options.deadline_at))
            for rank in range(shapes[0]["ranks"])
        ]
        addresses = [each["address"] for each in all_of(ranks, "open", config=options.engine)]
        for rank, process in enumerate(ranks):
            process.start("join", addresses=addresses, rank=rank, meeting=str(Path(folder) / "nccl"), hosts=hosts)
        gpus, name = answers_of(ranks)[0]
        limits = all_of(ranks, "limits")
        least = {name: min(each[name] for each in limits) for name in limits[0]}
        for shape in shapes:
            config = MoeConfig(**shape)
            report.step(f"{config.max_tokens} tokens, {config.in_dtype}")
            detail = {
                "gpu": f"{gpus} x {name}",
                "apart": hosts is not None,
                "node_size": config.node_size,
                "empty_us": least["empty_us"],
            }
            _one_shape(options, report, ranks, config, shape, least, detail)
        for process in ranks:
            process.hang_up()  # a process group of NCCL is left by all at once


def floors_of(config: MoeConfig, moved: float, rates: dict[str, float], apart: bool) -> dict[str, tuple[float, float]]:
    """Return the least microseconds that each half can take, by the wire and by memory of GPUs, when routes are even.

    Args:
        config: the shape.
        moved: rows that leave a GPU, and as many that come; by the nodes those that leave the host.
        rates: bytes per microsecond of `wire`, `memory` and `pcie`.
        apart: the wire is no faster than the way from GPU to pinned memory.
    """
    row = config.hidden * config.in_torch.itemsize + WORD_BYTES * config.scales
    back = config.hidden * config.out_torch.itemsize
    rows, own = config.max_tokens * config.top_k, config.max_tokens
    wire = rates["pcie" if apart else "wire"]
    # Own tokens are read, what comes is written and read, each row is written; back, each row is read.
    there = (moved * row / wire, (own + 2 * moved + rows) * row / rates["memory"])
    again = (moved * back / wire, (rows + 2 * moved + own) * back / rates["memory"])
    return {"dispatch": there, "combine": again, "both": (there[0] + again[0], there[1] + again[1])}


def _one_shape(
    options: Options,
    report: BenchReport,
    ranks: list[Process],
    config: MoeConfig,
    shape: dict[str, Any],
    limits: dict[str, float],
    detail: dict[str, Any],
) -> None:
    tokens, apart = config.max_tokens, detail["apart"]
    plans = all_of(ranks, "shape", shape=shape, tag=f"{tokens} {config.in_dtype}", seed=options.seed)
    verdicts = all_of(ranks, "check", seed=options.seed + 1)
    rounds = options.count or (ROUNDS if tokens <= MANY_TOKENS else MANY_ROUNDS)
    runs = all_of(ranks, "steps", batches=BATCHES, rounds=rounds)
    walls = all_of(ranks, "wall", rounds=rounds)
    counted, wrong = _counted(ranks, config, plans, apart)
    verdicts += [*all_of(ranks, "check", seed=options.seed + 3), wrong]
    nccl = [
        sample
        for each in all_of(ranks, "nccl", tokens=tokens, top_k=config.top_k, hidden=config.hidden)
        for sample in each
    ]
    verified = report.check(f"{tokens} tokens, {config.in_dtype}", "; ".join(each for each in verdicts if each))
    moved = statistics.mean(plan["moved"] for plan in plans)
    floors = floors_of(config, moved, limits, apart)
    row = config.hidden * config.in_torch.itemsize + WORD_BYTES * config.scales
    sent = {"dispatch": moved * row, "combine": moved * config.hidden * config.out_torch.itemsize}
    sent["both"] = sent["dispatch"] + sent["combine"]
    wall = _wall(walls)
    for run in runs:
        run["both"] = [there + back for there, back in zip(run["dispatch"], run["combine"], strict=True)]
    for figure, (wire, memory) in floors.items():
        pooled = [sample * 1e3 for run in runs for sample in run[figure]]
        slowest = [max(each) * 1e3 for each in zip(*(run[figure] for run in runs), strict=True)]
        (p50, p99), (slow_p50, slow_p99) = percentiles_us(pooled), percentiles_us(slowest)
        report.row(
            Point(
                bench="moe",
                figure=f"{figure}, {tokens} x {config.in_dtype}",
                provider=options.provider if apart else "nvlink",
                bytes=round(sent[figure]),
                processes=len(ranks),
                gbytes_per_s=Rate.of(sent[figure] / sample for sample in slowest),
                ops_per_s=Rate.of(1e9 / sample for sample in slowest),
                p50_us=p50,
                p99_us=p99,
                verified=verified,
                limit="wire" if wire >= memory else "memory",
                ratio=p50 / max(wire, memory),
                detail=detail
                | {name: getattr(config, name) for name in ("hidden", "top_k", "num_experts", "in_dtype", "out_dtype")}
                | {
                    "tokens": tokens,
                    "slowest_p50_us": slow_p50,
                    "slowest_p99_us": slow_p99,
                    "samples": len(pooled),
                    "wire_us": wire,
                    "memory_us": memory,
                    "nccl_us": percentiles_us([sample * 1e3 for sample in nccl])[0] if nccl else None,
                    "private_tokens": config.private,
                    "buffer_bytes": max(plan["buffer_bytes"] for plan in plans),
                }
                | ({} if apart else {"kernel_us": significant(p50 - detail["empty_us"])})
                | (wall | counted if figure == "both" else {}),
            )
        )


def _wall(walls: list[list[float]]) -> dict[str, float]:
    """Return keys of a row for whole steps by the clocks of the hosts, of all ranks and of the slowest."""
    pooled = percentiles_us([sample * 1e3 for each in walls for sample in each])
    slowest = percentiles_us([max(each) * 1e3 for each in zip(*walls, strict=True)])
    names = ("wall_us", "wall_p99_us", "wall_slowest_p50_us", "wall_slowest_p99_us")
    return dict(zip(names, (*pooled, *slowest), strict=True))


def _counted(
    ranks: list[Process], config: MoeConfig, plans: list[dict[str, Any]], apart: bool
) -> tuple[dict[str, list[float]], str]:
    """Return what each rank moved in a step, counted, and how that differs from what its routes state; "" is good."""
    before = all_of(ranks, "statistics")
    steps = all_of(ranks, "counted", steps=COUNTED_STEPS)
    after = all_of(ranks, "statistics")
    routes = [plan["rows"] for plan in plans]
    found: dict[str, list[float]] = {name: [step[name] for step in steps] for name in steps[0]}
    wanted: dict[str, list[float]] = {
        "rows": [sum(row) - row[rank] for rank, row in enumerate(routes)],
        "sums": [sum(row[rank] for row in routes) - routes[rank][rank] for rank in range(config.ranks)],
    }
    wanted = {name: right for name, right in wanted.items() if name in found}
    if apart:
        found = {name: found[name] for name in wanted}  # kernels only pack: the engine counts what is moved
        pairs = [
            [
                carried(config, routes[rank][far], routes[far][rank])
                for far in range(rank % config.node_size, config.ranks, config.node_size)
                if far != rank
            ]
            for rank in range(config.ranks)
        ]
        for at, (name, counter) in enumerate(TOTALS.items()):
            found[name] = [
                (later[counter] - sooner[counter]) / COUNTED_STEPS for sooner, later in zip(before, after, strict=True)
            ]
            wanted[name] = [sum(each[at] for each in row) for row in pairs]
    odd = [f"{name} {found[name]} instead of {right}" for name, right in wanted.items() if found[name] != right]
    return found if odd else found | wanted, "; ".join(odd)
