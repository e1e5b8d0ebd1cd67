"""`bench write`: throughput by size, the latency of one awaited write, and deep queues that nobody awaits."""

from __future__ import annotations

from typing import Any

from asyncfabric.bench.measure import percentiles_us
from asyncfabric.bench.rows import Point, rates
from asyncfabric_services.bench.limits.limit_side import LimitSide
from asyncfabric_services.bench.options import MIB, Options
from asyncfabric_services.bench.pair import BenchPair
from asyncfabric_services.bench.race import Contender, fastest, race, speed_ratio
from asyncfabric_services.bench.report.report import BenchReport
from asyncfabric_services.bench.transfers.fabric_side import FabricSide
from asyncfabric_services.quantities import format_size

SINGLES = 200
"""Awaited writes per repeat of the latency rows, fewer for large ones."""

DEEP_BYTES = MIB


def run_write(options: Options, report: BenchReport) -> None:
    """Measure throughput and single writes for each size."""
    report.expect(2 * len(options.sizes))
    busy = options.polling == "busy"
    with BenchPair("limits", options.deadline_at) as limit_pair:
        limits = LimitSide(limit_pair, options)
        ceilings = {size: limits.write_limits(size, options.window) for size in options.sizes}
        if busy:
            # A busy fabric never leaves the cores alone: limits beside it would be slow and flatter it.
            machine = limits.core_distance()
            for field in ceilings.values():
                race(field, repeats=options.repeats, duration=options.duration, count=options.count)
        with BenchPair("engine" if options.engine_level else "fabric", options.deadline_at) as pair:
            side = FabricSide(pair, options, options.memory, options.region_bytes)
            for size in options.sizes:
                if not busy:
                    machine = limits.core_distance()
                throughput(options, report, side, size, ceilings[size], machine)
                if not options.engine_level:
                    single_writes(options, report, side, size)
            report.check("counts", side.check_counts())


def facts(options: Options, side: FabricSide, **more: Any) -> dict[str, Any]:
    """Return the keys that state how a row was measured."""
    level = "engine" if options.engine_level else "python"
    how = {"rails": options.rails, "memory": options.memory, "polling": options.polling, "level": level}
    return how | {name: text for name, text in side.rail.items() if text} | more


def throughput(
    options: Options,
    report: BenchReport,
    side: FabricSide,
    size: int,
    ceiling: list[Contender],
    machine: dict[str, Any],
    figure: str = "throughput",
) -> None:
    """Measure a window of writes beside its limits, and publish the row."""
    report.step(f"write {format_size(size)}, window {options.window}")
    side.poison()
    ours = side.engine_writes(size, options.window) if options.engine_level else side.writes(size, options.window)
    field = [ours] if options.limits_first else [*ceiling, ours]
    race(field, repeats=options.repeats, duration=options.duration, count=options.count, on_start=side.forget_samples)
    verified = report.check(f"write {format_size(size)}", side.check_writes(size))
    gbytes_per_s, ops_per_s = rates(ours.seconds, ours.count, ours.count * size)
    p50, p99 = percentiles_us(side.samples_ns)
    limit = fastest(ceiling) if ceiling else None
    detail = facts(options, side, **machine)
    if limit is not None:
        limit_gbytes, _ = rates(limit.seconds, limit.count, limit.count * size)
        detail["limit_gbytes_per_s"] = limit_gbytes.as_row()
    report.row(
        Point(
            bench="write",
            figure=figure,
            provider=options.provider,
            bytes=size,
            window=options.window,
            gbytes_per_s=gbytes_per_s,
            ops_per_s=ops_per_s,
            p50_us=p50,
            p99_us=p99,
            verified=verified,
            limit=limit.name if limit else None,
            ratio=speed_ratio(ours, limit) if limit else None,
            detail=detail,
        )
    )


def single_writes(options: Options, report: BenchReport, side: FabricSide, size: int) -> None:
    """Measure writes that are awaited one after the other, and publish the row."""
    report.step(f"one write of {format_size(size)}, awaited")
    side.poison()
    count = options.count or max(10, min(SINGLES, (256 * MIB) // size))
    samples: list[int] = []
    seconds: list[float] = []
    for turn in range(options.repeats + 1):
        run = side.pair.initiator.call("write_single", op_bytes=size, count=count, imm=side.imm)
        side.note_sent(count)
        if turn > 0:  # the first is the warm-up
            samples += run["samples_ns"]
            seconds.append(run["seconds"])
    verified = report.check(f"single write {format_size(size)}", side.check_writes(size))
    gbytes_per_s, ops_per_s = rates(seconds, count, count * size)
    p50, p99 = percentiles_us(samples)
    report.row(
        Point(
            bench="write",
            figure="single-awaited",
            provider=options.provider,
            bytes=size,
            window=1,
            gbytes_per_s=gbytes_per_s,
            ops_per_s=ops_per_s,
            p50_us=p50,
            p99_us=p99,
            verified=verified,
            detail=facts(options, side),
        )
    )


def run_unawaited(options: Options, report: BenchReport, count: int) -> None:
    """Submit `count` writes of 1 MiB that nobody awaits, several rounds; memory must not grow from round to round."""
    report.expect(options.repeats)
    with BenchPair("fabric", options.deadline_at) as pair:
        side = FabricSide(pair, options, options.memory, options.region_bytes)
        seconds: list[float] = []
        resident: list[int] = []
        for turn in range(max(2, options.repeats)):
            report.step(f"{count} unawaited writes of {format_size(DEEP_BYTES)}, round {turn + 1}")
            run = side.pair.initiator.call("write_unawaited", op_bytes=DEEP_BYTES, count=count, imm=side.imm)
            side.note_sent(count)
            side.wait_arrivals()
            seconds.append(run["seconds"])
            resident.append(run["resident_bytes"])
        verified = report.check("unawaited writes", side.check_writes(DEEP_BYTES))
        verified &= report.check("counts", side.check_counts())
        gbytes_per_s, ops_per_s = rates(seconds, count, count * DEEP_BYTES)
        report.row(
            Point(
                bench="write",
                figure="unawaited",
                provider=options.provider,
                bytes=DEEP_BYTES,
                window=count,
                gbytes_per_s=gbytes_per_s,
                ops_per_s=ops_per_s,
                verified=verified,
                detail=facts(options, side, resident_bytes=resident, growth_bytes=resident[-1] - resident[0]),
            )
        )
