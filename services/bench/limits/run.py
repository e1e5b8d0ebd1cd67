"""`bench limits`: the ceilings of this machine, in the same form as everything that is compared with them."""

from __future__ import annotations

from typing import Any

from asyncfabric.bench.measure import Rate, percentiles_us
from asyncfabric.bench.rows import Point, rates
from asyncfabric_services.bench.limits.limit_side import LIBFABRIC_PROFILES, LimitSide
from asyncfabric_services.bench.options import Options
from asyncfabric_services.bench.pair import BenchPair
from asyncfabric_services.bench.race import Contender, fastest, race
from asyncfabric_services.bench.report.report import BenchReport
from asyncfabric_services.quantities import format_size

ROUND_TRIPS = 5000
LISTS = 20
NOTHING = Rate(0.0, 0.0, 0.0)


def run_limits(options: Options, report: BenchReport) -> None:
    """Measure every ceiling that this machine has."""
    report.expect(len(options.sizes) + len(options.page_sizes) + 2)
    with BenchPair("limits", options.deadline_at) as pair:
        limits = LimitSide(pair, options)
        machine = limits.core_distance() | {"non_temporal": limits.non_temporal_kind()}
        for size in options.sizes:
            _writes(options, report, limits, pair, size, machine)
        for page_bytes in options.page_sizes:
            _pages(options, report, limits, page_bytes, machine)
        _wake_ups(options, report, pair, machine)
        _libfabric_round_trips(options, report, limits, machine)


def _writes(
    options: Options, report: BenchReport, limits: LimitSide, pair: BenchPair, size: int, machine: dict[str, Any]
) -> None:
    report.step(f"limits at {format_size(size)}")
    field = [limits.copy("memcpy", size), limits.copy("memcpy_nt", size), limits.cma(size), limits.stream(size)]
    field += [found for name in LIBFABRIC_PROFILES if (found := limits.libfabric(name, size, options.window))]
    most = 0

    def note(contender: Contender) -> None:
        nonlocal most
        if contender.name == "cma":
            most = contender.count

    race(field, repeats=options.repeats, duration=options.duration, count=options.count, on_start=note)
    verdicts = {
        "memcpy": pair.initiator.call("check_mirror", written=min(limits.walk_bytes(size), field[0].count * size)),
        "cma": pair.target.call("check_landed", seed=options.seed, written=min(limits.walk_bytes(size), most * size)),
    }
    verdicts["memcpy_nt"] = verdicts["memcpy"]
    verdicts["tcp_stream"] = verdicts["cma"]
    for contender in field:
        gbytes_per_s, ops_per_s = rates(contender.seconds, contender.count, contender.count * size)
        verified = report.check(f"{contender.name} at {format_size(size)}", verdicts.get(contender.name, ""))
        windowed = contender.name.startswith("libfabric")
        window = options.window if windowed else 1
        _row(report, contender.name, size, 1, window, gbytes_per_s, ops_per_s, machine, verified=verified)


def _pages(options: Options, report: BenchReport, limits: LimitSide, page_bytes: int, machine: dict[str, Any]) -> None:
    report.step(f"limits of pages of {format_size(page_bytes)}")
    pages = min(options.pages, options.region_bytes // page_bytes)
    copies = [limits.copy_pages(name, page_bytes, pages) for name in ("memcpy", "memcpy_nt")]
    field = [*copies, limits.cma_pages(page_bytes, pages)]
    field += [found for name in LIBFABRIC_PROFILES if (found := limits.libfabric_pages(name, page_bytes, pages))]
    rounds = options.count or LISTS
    race(field, repeats=options.repeats, duration=options.duration, count=rounds)
    best = fastest(copies)
    for contender in field:
        if contender in copies and contender is not best:
            continue  # of the two copies the faster one is the ceiling
        gbytes_per_s, _ = rates(contender.seconds, rounds, rounds * pages * page_bytes)
        _, pages_per_s = rates(contender.seconds, rounds * pages, 0)
        name = "memcpy_pages" if contender is best else contender.name.removesuffix("_pages")
        detail = machine | ({"stores": best.name.removesuffix("_pages")} if contender is best else {})
        _row(report, name, page_bytes, pages, 1, gbytes_per_s, pages_per_s, detail)


def _wake_ups(options: Options, report: BenchReport, pair: BenchPair, machine: dict[str, Any]) -> None:
    report.step("wake-ups")
    count = options.count or ROUND_TRIPS
    for limit, ping, pong in (("eventfd", "eventfd_ping", "eventfd_pong"), ("trio_eventfd", "trio_ping", "trio_pong")):
        samples: list[int] = []
        seconds: list[float] = []
        for turn in range(options.repeats + 1):
            pair.target.start(pong, out=pair.back, into=pair.forth, count=count)
            now = pair.initiator.call(ping, out=pair.forth, into=pair.back, count=count)
            pair.target.finish()
            if turn > 0:
                samples += now
                seconds.append(sum(now) / 1e9)
        _, ops_per_s = rates(seconds, count, 0)
        p50, p99 = percentiles_us(samples)
        _row(report, limit, 0, 1, 1, NOTHING, ops_per_s, machine, p50=p50, p99=p99)


def _libfabric_round_trips(options: Options, report: BenchReport, limits: LimitSide, machine: dict[str, Any]) -> None:
    report.step("libfabric round trips")
    count = options.count or ROUND_TRIPS
    for profile in LIBFABRIC_PROFILES:
        runs = [limits.libfabric_round_trip(profile, count) for _ in range(options.repeats)]
        known = [run for run in runs if run is not None]
        if not known:
            continue
        _, ops_per_s = rates([run["seconds"] for run in known], count, 0)
        p50 = Rate.of(run["p50_us"] for run in known).median
        p99 = Rate.of(run["p99_us"] for run in known).median
        detail = machine | {"library": known[0]["library"]}
        _row(report, f"libfabric_{profile}", 0, 1, 1, NOTHING, ops_per_s, detail, p50=p50, p99=p99)


def _row(
    report: BenchReport,
    limit: str,
    size: int,
    pages: int,
    window: int,
    gbytes_per_s: Rate,
    ops_per_s: Rate,
    detail: dict[str, Any],
    *,
    p50: float | None = None,
    p99: float | None = None,
    verified: bool = True,
) -> None:
    report.row(
        Point(
            bench="limits",
            figure="limit",
            provider="none",
            bytes=size,
            pages=pages,
            window=window,
            processes=1 if limit.startswith("memcpy") else 2,
            gbytes_per_s=gbytes_per_s,
            ops_per_s=ops_per_s,
            p50_us=p50,
            p99_us=p99,
            verified=verified,
            limit=limit,
            detail=detail,
        )
    )
