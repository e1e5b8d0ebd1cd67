"""`bench kv`: whole streams of layers between two pools, against the bare memcpy of the same run."""

from __future__ import annotations

import statistics
from typing import Any

from asyncfabric.bench.measure import percentiles_us, significant
from asyncfabric.bench.rows import Point, rates
from asyncfabric_services.bench.limit_side import LimitSide
from asyncfabric_services.bench.options import Options
from asyncfabric_services.bench.pair import Pair
from asyncfabric_services.bench.race import Contender, fastest, race, speed_ratio
from asyncfabric_services.bench.report import Report
from asyncfabric_services.quantities import format_size

STREAMS = 10
"""Streams per repeat, each to other pages."""


def run_kv(options: Options, report: Report, layers: int) -> None:
    """Measure each page size."""
    report.expect(len(options.page_sizes))
    with Pair("limits", options.deadline_at) as limit_pair, Pair("kv", options.deadline_at) as pair:
        limits = LimitSide(limit_pair, options)
        rail, _ = pair.both("open", config=options.engine)
        for page_bytes in options.page_sizes:
            _streams(options, report, limits, pair, page_bytes, layers, rail)


def _streams(
    options: Options, report: Report, limits: LimitSide, pair: Pair, page_bytes: int, layers: int, rail: dict[str, Any]
) -> None:
    pool_pages = max(1, options.region_bytes // (page_bytes * layers))
    each = max(1, min(options.pages // layers, pool_pages))
    report.step(f"{layers} layers of {each} pages of {format_size(page_bytes)}")
    shape = {"kind": options.memory, "page_bytes": page_bytes, "layers": layers, "pages": pool_pages}
    pair.initiator.call("pool", **shape, seed=options.seed, fill=options.seed)
    pair.target.call("pool", **shape, seed=options.seed + 1, fill=None)
    hosts: list[float] = []
    samples: list[float] = []

    def stream() -> tuple[dict[str, Any], float]:
        offer = pair.target.call("offer", pages=each)
        pair.target.start("receive")
        run = pair.initiator.call("stream", offer=offer)
        arrived = pair.target.finish()
        return run, (max(arrived, run["finished_ns"]) - run["started_ns"]) / 1e9

    def repeat(count: int) -> float:
        total = 0.0
        for _ in range(count):
            run, seconds = stream()
            hosts.append(run["host_seconds"] / run["pages"])
            samples.append(seconds * 1e9)
            total += seconds
        return total

    def forget(_: Contender) -> None:
        hosts.clear()
        samples.clear()

    pages = each * layers
    ours = Contender("asyncfabric", repeat)
    copies = limits.page_limits(page_bytes, pages)
    whole = [limits.copy("memcpy", page_bytes)] if options.carrier == "local" and options.memory != "foreign" else []
    rounds = options.count or STREAMS
    # The whole copy is given as many bytes per op as a stream moves, so that all costs are per stream.
    field = [*(_repeated(copy, pages) for copy in whole), *copies, ours]
    race(field, repeats=options.repeats, duration=options.duration, count=rounds, on_start=forget)
    limit = field[0] if whole else fastest(copies)
    pair.target.call("poison")
    last, _ = stream()
    verdict = pair.target.call("check_stream", seed=options.seed, source_pages=last["source_pages"])
    gbytes_per_s, _ = rates(ours.seconds, rounds, rounds * pages * page_bytes)
    _, pages_per_s = rates(ours.seconds, rounds * pages, 0)
    limit_gbytes, _ = rates(limit.seconds, rounds, rounds * pages * page_bytes)
    p50, p99 = percentiles_us(samples)
    bare = fastest(copies)
    report.row(
        Point(
            bench="kv",
            figure="stream",
            provider=options.provider,
            bytes=page_bytes,
            pages=pages,
            gbytes_per_s=gbytes_per_s,
            ops_per_s=pages_per_s,
            p50_us=p50,
            p99_us=p99,
            verified=report.check(f"streams of {format_size(page_bytes)}", verdict),
            limit=limit.name,
            ratio=speed_ratio(ours, limit),
            detail={
                "layers": layers,
                "rails": options.rails,
                "memory": options.memory,
                "polling": options.polling,
                "level": "python",
                "host_us_per_page": significant(statistics.median(hosts) * 1e6),
                "limit_gbytes_per_s": limit_gbytes.as_row(),
                "page_loop": bare.name,
                "page_loop_ratio": speed_ratio(ours, bare),
                **limits.core_distance(),
                **{name: rail[name] for name in ("library", "version") if rail[name]},
            },
        )
    )


def _repeated(contender: Contender, times: int) -> Contender:
    """Return the contender with `times` of its ops as one."""
    return Contender(contender.name, lambda count: contender.repeat(count * times))
