"""`bench limits|write|notify --device cuda`: the first GPU writes to the last one, each figure beside torch's copy.

On a machine with one GPU both processes share it, and the limit is a copy inside it. Pages run in transfers.
"""

from __future__ import annotations

from contextlib import ExitStack

from asyncfabric.bench.measure import Rate, percentiles_us
from asyncfabric.bench.rows import Point, rates
from asyncfabric_services.bench.gpu.limit_side import GpuLimitSide
from asyncfabric_services.bench.options import MIB, Options
from asyncfabric_services.bench.pair import BenchPair
from asyncfabric_services.bench.race import race
from asyncfabric_services.bench.report.report import BenchReport
from asyncfabric_services.bench.transfers.fabric_side import FabricSide
from asyncfabric_services.bench.transfers.write_run import facts, single_writes, throughput
from asyncfabric_services.quantities import format_size

ROUNDS = 3000
HOST_BYTES = 256 * MIB
NOTHING = Rate(0.0, 0.0, 0.0)
ENDS = (("host-to-gpu", "host", "allocated", "pinned_up"), ("gpu-to-host", "allocated", "host", "pinned_down"))
WORDS = (
    ("watch-word-to-task", "watch_task"),
    ("watch-word-to-write", "watch_write"),
    ("signal-to-kernel", "signal_kernel"),
)
"""Figure, and the call of the worker that measures it. All have the way to a kernel, or back from it, in them."""


def run_gpu_write(options: Options, report: BenchReport) -> None:
    """Measure writes between two GPUs, and between a GPU and the other process's host memory."""
    report.expect(2 * len(options.sizes) + len(ENDS))
    with ExitStack() as stack:  # the processes load torch at the same time
        kinds = ("gpu-limits", "gpu", *("gpu" for _ in ENDS))
        limit_pair, pair, *end_pairs = [stack.enter_context(BenchPair(kind, options.deadline_at)) for kind in kinds]
        limits = GpuLimitSide(limit_pair, options)
        side = FabricSide(pair, options, options.memory, options.region_bytes)
        for size in options.sizes:
            ceiling = limits.write_limits(size, options.window)
            throughput(options, report, side, size, ceiling, limits.core_distance())
            single_writes(options, report, side, size)
        report.check("counts", side.check_counts())
        size = min(HOST_BYTES, options.region_bytes)
        for (figure, memory, memory_there, limit), end_pair in zip(ENDS, end_pairs, strict=True):
            side = FabricSide(end_pair, options, memory, size, memory_there)
            ceiling = [limits.copy(limit, size)]
            throughput(options, report, side, size, ceiling, limits.core_distance(), figure)


def run_gpu_limits(options: Options, report: BenchReport) -> None:
    """Measure torch's copies: between the GPUs, in flight and awaited, and to and from page-locked host memory."""
    report.expect(len(options.sizes))
    with BenchPair("gpu-limits", options.deadline_at) as pair:
        limits = GpuLimitSide(pair, options)
        for size in options.sizes:
            report.step(f"copies of {format_size(size)}")
            field = [limits.copy(name, size) for name in ("peer_copy", "pinned_up", "pinned_down")]
            field.append(limits.copy("peer_copy", size, awaited=True))
            race(field, repeats=options.repeats, duration=options.duration, count=options.count)
            for contender in field:
                gbytes_per_s, ops_per_s = rates(contender.seconds, contender.count, contender.count * size)
                report.row(
                    Point(
                        bench="limits",
                        figure="limit",
                        provider="none",
                        bytes=size,
                        processes=1,
                        gbytes_per_s=gbytes_per_s,
                        ops_per_s=ops_per_s,
                        verified=True,
                        limit=contender.name,
                        detail=limits.core_distance(),
                    )
                )


def run_gpu_notify(options: Options, report: BenchReport) -> None:
    """Measure how fast a kernel's word reaches a task and sets off a write, and a signal a kernel; and a bare loop."""
    report.expect(len(WORDS) + 1)
    count = max(options.count or ROUNDS, 1) + 200
    with BenchPair("gpu", options.deadline_at) as pair:
        side = FabricSide(pair, options, options.memory, MIB)
        bare = percentiles_us(pair.initiator.call("bare_echo", count=count))
        for figure, call in WORDS:
            report.step(figure)
            samples: list[int] = []
            seconds: list[float] = []
            for _ in range(options.repeats):
                now = pair.initiator.call(call, count=count)
                samples += now
                seconds.append(sum(now) / 1e9)
            p50, p99 = percentiles_us(samples)
            _, ops_per_s = rates(seconds, len(samples) // options.repeats, 0)
            report.row(
                Point(
                    bench="notify",
                    figure=figure,
                    provider=options.provider,
                    bytes=0,
                    processes=1,
                    gbytes_per_s=NOTHING,
                    ops_per_s=ops_per_s,
                    p50_us=p50,
                    p99_us=p99,
                    verified=True,
                    limit="bare_echo",
                    ratio=p50 / bare[0],
                    detail=facts(options, side, limit_p50_us=bare[0], limit_p99_us=bare[1]),
                )
            )
