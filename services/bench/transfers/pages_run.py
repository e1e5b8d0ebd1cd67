"""`bench pages`: scattered pages in one call against the bare copy loop over the same lists; and a very long list.

Written, or with `--read` read.
"""

from __future__ import annotations

import statistics
from typing import Any

from asyncfabric.bench.measure import percentiles_us, significant
from asyncfabric.bench.rows import Point, rates
from asyncfabric_services.bench.gpu.limit_side import GpuLimitSide
from asyncfabric_services.bench.limits.limit_side import LimitSide
from asyncfabric_services.bench.options import KIB, Options
from asyncfabric_services.bench.pair import BenchPair
from asyncfabric_services.bench.race import Contender, fastest, race, speed_ratio
from asyncfabric_services.bench.report.report import BenchReport
from asyncfabric_services.bench.transfers.fabric_side import FabricSide
from asyncfabric_services.bench.transfers.write_run import facts
from asyncfabric_services.quantities import format_size

LISTS = 20
"""Page lists per repeat, each other pages: the same list again would be read from the cache."""

LONG_LIST = 10_000
LONG_LIST_PAGE = 4 * KIB


def run_pages(options: Options, report: BenchReport) -> None:
    """Measure each page size, then the call with the long list."""
    report.expect(len(options.page_sizes) + 1)
    busy = options.limits_first
    with (
        BenchPair("gpu-limits" if options.on_gpu else "limits", options.deadline_at) as limit_pair,
        BenchPair("gpu" if options.on_gpu else "fabric", options.deadline_at) as pair,
    ):
        limits = GpuLimitSide(limit_pair, options) if options.on_gpu else LimitSide(limit_pair, options)
        pair.both("hello")  # which has begun then, and stands still beside the limits
        ceilings = {size: limits.page_limits(size, pages_of(options, size)) for size in options.page_sizes}
        if busy:
            # As for writes: beside a busy fabric the limits would be slow and flatter it.
            machine = limits.core_distance()
            for field in ceilings.values():
                race(field, repeats=options.repeats, duration=options.duration, count=options.count or LISTS)
        side = FabricSide(pair, options, options.memory, options.region_bytes, reads=options.reads)
        for page_bytes, ceiling in ceilings.items():
            if not busy:
                machine = limits.core_distance()
            _lists(options, report, side, page_bytes, ceiling, machine)
        _long_list(options, report, side)
        report.check("counts", side.check_counts())


def pages_of(options: Options, page_bytes: int) -> int:
    """Return how many pages one call writes: what was asked for, or its share of what the region has."""
    return min(options.pages, options.region_bytes // page_bytes // options.window)


def page_moves(
    side: FabricSide, page_bytes: int, pages: int, seed: int, calls: list[float], window: int = 1
) -> Contender:
    """Return one call per op, over a new list each; how long each call kept the loop goes to `calls`."""

    def repeat(rounds: int) -> float:
        turns = side.pair.initiator.call(
            "move_pages",
            page_bytes=page_bytes,
            count=pages,
            list_seed=seed,
            calls=window,
            turns=rounds // window,
            imm=side.imm,
            read=side.options.reads,
        )
        for turn in turns:
            side.note_sent(window * pages, [turn["seconds"] * 1e9])
            calls.append(turn["call_seconds"])
        return sum(float(turn["seconds"]) for turn in turns)

    return Contender("asyncfabric", repeat)


def _lists(
    options: Options,
    report: BenchReport,
    side: FabricSide,
    page_bytes: int,
    ceiling: list[Contender],
    machine: dict[str, Any],
) -> None:
    report.step(f"{options.pages} scattered pages of {format_size(page_bytes)}")
    side.poison()
    pages = pages_of(options, page_bytes)
    rounds = -(-(options.count or LISTS) // options.window) * options.window
    calls: list[float] = []
    ours = page_moves(side, page_bytes, pages, options.seed, calls, options.window)
    field = [ours] if options.limits_first else [*ceiling, ours]
    race(field, repeats=options.repeats, duration=options.duration, count=rounds, on_start=side.forget_samples)
    side.wait_arrivals()
    verdict = side.receiver.call(
        "check_pages",
        seed=options.seed,
        page_bytes=page_bytes,
        count=pages * options.window,
        list_seed=options.seed,
        rounds=rounds // options.window,
    )
    limit = fastest(ceiling)
    gbytes_per_s, _ = rates(ours.seconds, rounds, rounds * pages * page_bytes)
    _, pages_per_s = rates(ours.seconds, rounds * pages, 0)
    limit_gbytes, _ = rates(limit.seconds, rounds, rounds * pages * page_bytes)
    p50, p99 = percentiles_us(side.samples_ns)
    call_us = significant(statistics.median(calls) * 1e6)
    report.row(
        Point(
            bench="pages",
            figure="scattered-pages-read" if options.reads else "scattered-pages",
            provider=options.provider,
            bytes=page_bytes,
            pages=pages,
            window=options.window,
            gbytes_per_s=gbytes_per_s,
            ops_per_s=pages_per_s,
            p50_us=p50,
            p99_us=p99,
            verified=report.check(f"pages of {format_size(page_bytes)}", verdict),
            limit=limit.name,
            ratio=speed_ratio(ours, limit),
            detail=facts(options, side, call_us=call_us, limit_gbytes_per_s=limit_gbytes.as_row(), **machine),
        )
    )


def _long_list(options: Options, report: BenchReport, side: FabricSide) -> None:
    pages = min(LONG_LIST, options.region_bytes // LONG_LIST_PAGE)
    report.step(f"one call with {pages} pages")
    side.poison()
    calls: list[float] = []
    rounds = options.count or LISTS
    ours = page_moves(side, LONG_LIST_PAGE, pages, options.seed, calls)
    race([ours], repeats=options.repeats, duration=options.duration, count=rounds, on_start=side.forget_samples)
    side.wait_arrivals()
    verdict = side.receiver.call(
        "check_pages", seed=options.seed, page_bytes=LONG_LIST_PAGE, count=pages, list_seed=options.seed, rounds=rounds
    )
    gbytes_per_s, _ = rates(ours.seconds, rounds, rounds * pages * LONG_LIST_PAGE)
    _, pages_per_s = rates(ours.seconds, rounds * pages, 0)
    timed = calls[rounds:]  # without the warm-up
    p50, p99 = percentiles_us([each * 1e9 for each in timed])
    report.row(
        Point(
            bench="pages",
            figure="read-call-keeps-loop" if options.reads else "call-keeps-loop",
            provider=options.provider,
            bytes=LONG_LIST_PAGE,
            pages=pages,
            gbytes_per_s=gbytes_per_s,
            ops_per_s=pages_per_s,
            p50_us=p50,
            p99_us=p99,
            verified=report.check("the long list", verdict),
            detail=facts(options, side, call_us=p50, call_max_us=significant(max(timed) * 1e6)),
        )
    )
