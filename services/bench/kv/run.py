"""`bench kv`: whole streams of layers between two pools, against the bare memcpy of the same run.

With `--device cuda` between pools on GPUs, against torch's copy.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from asyncfabric.bench.measure import percentiles_us, significant
from asyncfabric.bench.rows import Point, rates
from asyncfabric_services.bench.gpu.limit_side import GpuLimitSide
from asyncfabric_services.bench.limits.limit_side import LimitSide
from asyncfabric_services.bench.options import Options
from asyncfabric_services.bench.pair import BenchPair
from asyncfabric_services.bench.race import Contender, fastest, race, speed_ratio
from asyncfabric_services.bench.report.report import BenchReport
from asyncfabric_services.quantities import format_size

STREAMS = 10
"""Streams per repeat, each to other pages."""


class KvShape(NamedTuple):
    """How the prompt of a stream is cut: layers, chunks, and whether a push has all layers of a chunk."""

    layers: int
    chunks: int
    together: bool


def run_kv(options: Options, report: BenchReport, shape: KvShape) -> None:
    """Measure each page size."""
    report.expect(len(options.page_sizes))
    limit_kind, kind = ("gpu-limits", "kv-gpu") if options.on_gpu else ("limits", "kv")
    with BenchPair(limit_kind, options.deadline_at) as limit_pair, BenchPair(kind, options.deadline_at) as pair:
        limits = GpuLimitSide(limit_pair, options) if options.on_gpu else LimitSide(limit_pair, options)
        pair.target.start("open", config=options.engine_there)
        rail = pair.initiator.call("open", config=options.engine)
        pair.target.finish()
        for page_bytes in options.page_sizes:
            _streams(options, report, limits, pair, page_bytes, shape, rail)


class _Streamer:
    """Streams, or the bare writes of the same pages, as a contender; keeps what each of them cost."""

    def __init__(self, pair: BenchPair, pages: int, shape: KvShape, *, bare: bool) -> None:
        self._pair = pair
        self._pages = pages
        self._how = {"chunks": shape.chunks, "together": shape.together, "bare": bare}
        self.runs: list[dict[str, Any]] = []
        self.seconds: list[float] = []

    def stream(self) -> float:
        """Move all pages of one lease; return the seconds until both ends know."""
        offer = self._pair.target.call("offer", pages=self._pages)
        self._pair.target.start("receive")
        run = self._pair.initiator.call("stream", offer=offer, **self._how)
        arrived = self._pair.target.finish()
        self.runs.append(run)
        self.seconds.append((max(arrived, run["finished_ns"]) - run["started_ns"]) / 1e9)
        return self.seconds[-1]

    def repeat(self, count: int) -> float:
        """Return the seconds of `count` streams, one after the other."""
        return sum([self.stream() for _ in range(count)])

    def forget(self) -> None:
        """Drop what the warm-up cost."""
        self.runs.clear()
        self.seconds.clear()

    def us_per(self, cost: str, of: str) -> float:
        """Return the median over the streams of one cost for each of what a stream has, in us."""
        return significant(statistics.median(run[cost] / run[of] for run in self.runs) * 1e6)


def _streams(
    options: Options,
    report: BenchReport,
    limits: LimitSide | GpuLimitSide,
    pair: BenchPair,
    page_bytes: int,
    shape: KvShape,
    rail: dict[str, Any],
) -> None:
    layers = shape.layers
    pool_pages = max(1, options.region_bytes // (page_bytes * layers))
    each = max(1, min(options.pages // layers, pool_pages))
    report.step(f"{layers} layers of {each} pages of {format_size(page_bytes)}")
    memory = {"kind": options.memory, "page_bytes": page_bytes, "layers": layers, "pages": pool_pages}
    pair.initiator.call("pool", **memory, seed=options.seed, fill=options.seed)
    pair.target.call("pool", **memory, seed=options.seed + 1, fill=None)
    streams, writes = _Streamer(pair, each, shape, bare=False), _Streamer(pair, each, shape, bare=True)

    def forget(_: Contender) -> None:
        streams.forget()
        writes.forget()

    pages = each * layers
    ours, write_pages = Contender("asyncfabric", streams.repeat), Contender("write_pages", writes.repeat)
    copies = limits.page_limits(page_bytes, pages)
    by_memcpy = not options.on_gpu and options.carrier == "local" and options.memory != "foreign"
    whole = [limits.copy("memcpy", page_bytes)] if by_memcpy else []
    rounds = options.count or STREAMS
    # The whole copy is given as many bytes per op as a stream moves, so that all costs are per stream.
    field = [*(_repeated(copy, pages) for copy in whole), *copies, write_pages, ours]
    race(field, repeats=options.repeats, duration=options.duration, count=rounds, on_start=forget)
    limit = field[0] if whole else fastest(copies)
    pair.target.call("poison")
    streams.stream()
    verdict = pair.target.call("check_stream", seed=options.seed, source_pages=streams.runs.pop()["source_pages"])
    gbytes_per_s, _ = rates(ours.seconds, rounds, rounds * pages * page_bytes)
    _, pages_per_s = rates(ours.seconds, rounds * pages, 0)
    limit_gbytes, _ = rates(limit.seconds, rounds, rounds * pages * page_bytes)
    p50, p99 = percentiles_us([seconds * 1e9 for seconds in streams.seconds[:-1]])
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
                "host_us_per_page": streams.us_per("host_seconds", "pages"),
                "chunks": shape.chunks,
                "together": shape.together,
                "pushes": streams.runs[0]["pushes"],
                "push_cpu_us": streams.us_per("push_seconds", "pushes"),
                "write_pages_cpu_us": writes.us_per("push_seconds", "pushes"),
                "write_pages_ratio": speed_ratio(ours, write_pages),
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
