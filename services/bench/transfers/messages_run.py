"""`bench messages`: round trips of messages beside those of signals, and messages one way, beside NIXL's notes.

Figures of one kind are measured in turn, repeat by repeat, so that ratios compare the same moment.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from asyncfabric.bench.measure import percentiles_us
from asyncfabric.bench.rows import Point, rates
from asyncfabric_services.bench.nixl.worker import installed_nixl
from asyncfabric_services.bench.options import MIB, Options
from asyncfabric_services.bench.pair import BenchPair
from asyncfabric_services.bench.race import Contender, race, speed_ratio
from asyncfabric_services.bench.report.report import BenchReport
from asyncfabric_services.bench.transfers.fabric_side import FabricSide
from asyncfabric_services.bench.transfers.note_worker import TRANSPORTS

ROUNDS = 2000
MANY = 20000
MESSAGE_BYTES = 32


def run_messages(options: Options, report: BenchReport) -> None:
    """Measure all figures of one provider and polling mode."""
    report.expect(3)
    with ExitStack() as stack:
        pair = stack.enter_context(BenchPair("fabric", options.deadline_at))
        side = FabricSide(pair, options, options.memory, MIB)
        notes = None
        if installed_nixl() is not None and options.provider in TRANSPORTS:
            notes = _meet(stack.enter_context(BenchPair("notes", options.deadline_at)), options.provider)
        for way in ("await", "spin"):
            report.step(f"{way}-round-trip")
            trips = [
                _Trips(f"signal-{way}-round-trip", 0, partial(_signals, side, way)),
                _Trips(f"message-{way}-round-trip", MESSAGE_BYTES, partial(_messages, side, way)),
            ]
            if way == "spin" and notes is not None:
                trips.append(_Trips("nixl-round-trip", MESSAGE_BYTES, partial(_notes, notes)))
            _round_trips(options, report, trips)
        report.step("one way")
        _one_way(options, report, side, notes)
        report.check("counts of the fabrics", side.check_counts())


class _Trips:
    """One kind of round trip; keeps the samples of the repeats that count."""

    def __init__(self, figure: str, length_bytes: int, run: Callable[[int], list[int]]) -> None:
        self.figure = figure
        self.length_bytes = length_bytes
        self.samples_ns: list[int] = []
        self._run = run
        self.contender = Contender(figure, self._repeat)

    def _repeat(self, count: int) -> float:
        samples = self._run(count)
        self.samples_ns += samples
        return percentiles_us(samples)[0] * 1e-6 * count  # by the median, which a turn of the scheduler does not move

    def forget(self, _: Contender) -> None:
        self.samples_ns = []


def _meet(pair: BenchPair, provider: str) -> BenchPair:
    ours = pair.initiator.call("open", name="initiator", provider=provider)
    theirs = pair.target.call("open", name="target", provider=provider)
    pair.initiator.call("connect", name="target", metadata=theirs)
    pair.target.call("connect", name="initiator", metadata=ours)
    return pair


def _signals(side: FabricSide, way: str, count: int) -> list[int]:
    side.pair.target.start(f"pong_{way}", imm=side.own_imm, base=side.arrivals, count=count)
    samples: list[int] = side.pair.initiator.call(f"ping_{way}", imm=side.imm, base=side.returns, count=count)
    side.pair.target.finish()
    side.note_sent(count)
    side.returns += count
    return samples


def _messages(side: FabricSide, way: str, count: int) -> list[int]:
    size = MESSAGE_BYTES
    side.pair.target.start(f"message_pong_{way}", length_bytes=size, count=count)
    samples: list[int] = side.pair.initiator.call(f"message_ping_{way}", length_bytes=size, count=count)
    side.pair.target.finish()
    return samples


def _notes(notes: BenchPair, count: int) -> list[int]:
    notes.target.start("pong", length_bytes=MESSAGE_BYTES, count=count)
    samples: list[int] = notes.initiator.call("ping", length_bytes=MESSAGE_BYTES, count=count)
    notes.target.finish()
    return samples


def _round_trips(options: Options, report: BenchReport, trips: list[_Trips]) -> None:
    count = options.count or ROUNDS
    by_name = {one.figure: one for one in trips}
    race(
        [one.contender for one in trips],
        repeats=options.repeats,
        duration=options.duration,
        count=count,
        on_start=lambda contender: by_name[contender.name].forget(contender),
    )
    signals = trips[0]
    for one in trips:
        p50, p99 = percentiles_us(one.samples_ns)
        ratio = 1 / speed_ratio(one.contender, signals.contender) if one is not signals else None
        figures = {"p50_us": p50, "p99_us": p99, "limit": None if ratio is None else "signal", "ratio": ratio}
        _row(options, report, one.contender, one.length_bytes, figures)


def _one_way(options: Options, report: BenchReport, side: FabricSide, notes: BenchPair | None) -> None:
    verdicts: dict[str, bool] = {}

    def messages(take: str) -> Contender:
        def repeat(count: int) -> float:
            side.pair.target.start(take, count=count)
            started = side.pair.initiator.call("send_many", length_bytes=MESSAGE_BYTES, count=count)
            ended, well = side.pair.target.finish()
            verdicts[take] = verdicts.get(take, True) and well
            return float(ended - started) / 1e9

        return Contender(take, repeat)

    def compared(pair: BenchPair) -> Contender:
        def repeat(count: int) -> float:
            pair.target.start("receive_many", count=count)
            started = pair.initiator.call("send_many", length_bytes=MESSAGE_BYTES, count=count)
            return float(pair.target.finish() - started) / 1e9

        return Contender("nixl", repeat)

    ours = [messages("receive_many"), messages("spin_many")]
    theirs = [compared(notes)] if notes is not None else []
    count = MANY if options.count is None else 10 * options.count
    race([*ours, *theirs], repeats=options.repeats, duration=options.duration, count=count)
    for one, way in zip(ours, ("await", "spin"), strict=True):
        well = report.check(f"messages one way, {way}", "" if verdicts[one.name] else "one is lost, twice or too early")
        figures: dict[str, Any] = {"verified": well}
        if theirs:
            figures |= {"limit": "nixl_notes", "ratio": speed_ratio(one, theirs[0])}
        one.name = f"message-{way}-one-way"
        _row(options, report, one, MESSAGE_BYTES, figures)
    for one in theirs:
        one.name = "nixl-one-way"
        _row(options, report, one, MESSAGE_BYTES, {})


def _row(options: Options, report: BenchReport, one: Contender, length_bytes: int, figures: dict[str, Any]) -> None:
    gbytes_per_s, ops_per_s = rates(one.seconds, one.count, one.count * length_bytes)
    point = Point(
        bench="messages",
        figure=one.name,
        provider=options.provider,
        bytes=length_bytes,
        gbytes_per_s=gbytes_per_s,
        ops_per_s=ops_per_s,
        detail={"rails": options.rails, "polling": options.polling},
        **({"verified": True} | figures),
    )
    report.row(point)
