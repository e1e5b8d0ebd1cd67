"""`bench notify`: how fast an end learns of the other, natively, spinning or awaiting; what idling costs.

And what a write costs that is waited for at once, in a thread without an event loop beside a task that awaits.
"""

from __future__ import annotations

from typing import Any

from asyncfabric.bench.measure import Rate, percentiles_us, significant
from asyncfabric.bench.rows import Point, rates
from asyncfabric_services.bench.limits.limit_side import LimitSide
from asyncfabric_services.bench.options import KIB, MIB, Options
from asyncfabric_services.bench.pair import BenchPair
from asyncfabric_services.bench.report.report import BenchReport
from asyncfabric_services.bench.transfers.fabric_side import FabricSide
from asyncfabric_services.bench.transfers.write_run import facts

ROUNDS = 4000
SEEN_BYTES = 4 * KIB
TOGETHER = 1000
TOGETHER_BYTES = 64
IDLE_SECONDS = 3.0
NOTHING = Rate(0.0, 0.0, 0.0)


def run_notify(options: Options, report: BenchReport) -> None:
    """Measure all figures of one provider and polling mode."""
    report.expect(7 if options.polling == "busy" else 8)
    with BenchPair("limits", options.deadline_at) as limit_pair:
        limits = LimitSide(limit_pair, options)
        # Limits are measured while no busy fabric is open: it would take their cores.
        machine = limits.core_distance()
        bare = [_bare_round_trips(options, limit_pair) for _ in range(options.repeats)]
        with BenchPair("engine", options.deadline_at) as pair:
            side = FabricSide(pair, options, options.memory, MIB)
            _native(options, report, side, machine, 0, "native-round-trip")
            _native(options, report, side, machine, SEEN_BYTES, "native-write-round-trip")
            report.check("counts of the engines", side.check_counts())
        machine = limits.core_distance()
        with BenchPair("fabric", options.deadline_at) as pair:
            side = FabricSide(pair, options, options.memory, MIB)
            _write_seen(options, report, side, machine)
            _spin(options, report, side, machine)
            _await(options, report, side, limit_pair, bare, machine)
            if options.polling != "busy":  # the workers of two fabrics of one process would take each other's core
                _blocking(options, report, side, machine)
            _together(options, report, side, machine)
            report.check("counts of the fabrics", side.check_counts())
            _idle(options, report, side, machine)


def _native(
    options: Options, report: BenchReport, side: FabricSide, machine: dict[str, Any], op_bytes: int, figure: str
) -> None:
    report.step(figure)
    options_level = {"level": "engine"}
    count = options.count or ROUNDS
    samples, seconds = _ping_pong(options, side, "ping", "pong", count, op_bytes=op_bytes)
    _row(options, report, side, figure, op_bytes, samples, seconds, count, machine | options_level)


def _spin(options: Options, report: BenchReport, side: FabricSide, machine: dict[str, Any]) -> None:
    report.step("spin-round-trip")
    count = options.count or ROUNDS
    samples, seconds = _ping_pong(options, side, "ping_spin", "pong_spin", count)
    _row(options, report, side, "spin-round-trip", 0, samples, seconds, count, machine)


def _bare_round_trips(options: Options, limits: BenchPair) -> list[int]:
    """Return round trips of two bare trio programs over a pair of eventfds."""
    count = options.count or ROUNDS // 2
    limits.target.start("trio_pong", out=limits.back, into=limits.forth, count=count)
    samples: list[int] = limits.initiator.call("trio_ping", out=limits.forth, into=limits.back, count=count)
    limits.target.finish()
    return samples


def _await(
    options: Options,
    report: BenchReport,
    side: FabricSide,
    limits: BenchPair,
    before: list[list[int]],
    machine: dict[str, Any],
) -> None:
    """Awaited round trips, in turn with two bare trio programs; beside a busy fabric those were measured `before`."""
    report.step("await-round-trip")
    count = options.count or ROUNDS // 2
    ours: list[int] = []
    bare: list[int] = []
    seconds: list[float] = []
    ratios: list[float] = []
    for turn in range(options.repeats + 1):
        bare_now = before[turn - 1] if options.polling == "busy" else _bare_round_trips(options, limits)
        ours_now = _one_ping_pong(side, "ping_await", "pong_await", count)
        if turn > 0:
            ours += ours_now
            bare += bare_now
            seconds.append(sum(ours_now) / 1e9)
            ratios.append(percentiles_us(ours_now)[0] / percentiles_us(bare_now)[0])
    bare_p50, bare_p99 = percentiles_us(bare)
    detail = machine | {"limit_p50_us": bare_p50, "limit_p99_us": bare_p99}
    ratio = Rate.of(ratios).median
    _row(options, report, side, "await-round-trip", 0, ours, seconds, count, detail, "trio_eventfd", ratio)


def _write_seen(options: Options, report: BenchReport, side: FabricSide, machine: dict[str, Any]) -> None:
    report.step("write-seen-by-spin")
    count = options.count or ROUNDS
    samples: list[int] = []
    seconds: list[float] = []
    side.poison()
    for turn in range(options.repeats + 1):
        side.pair.target.start("see_write", imm=side.own_imm, base=side.arrivals, count=count)
        sent = side.pair.initiator.call("write_seen", op_bytes=SEEN_BYTES, imm=side.imm, base=side.returns, count=count)
        seen = side.pair.target.finish()
        side.note_sent(count)
        side.returns += count
        if turn > 0:
            now = [after - before for before, after in zip(sent, seen, strict=True)]
            samples += now
            seconds.append(sum(now) / 1e9)
    verdict = side.pair.target.call("check_prefix", seed=options.seed, written=SEEN_BYTES)
    verified = report.check("the write that was seen", verdict)
    _row(options, report, side, "write-seen-by-spin", SEEN_BYTES, samples, seconds, count, machine, verified=verified)


def _blocking(options: Options, report: BenchReport, side: FabricSide, machine: dict[str, Any]) -> None:
    """Writes that are waited for one by one: without an event loop, in turn with the same writes awaited."""
    report.step("blocking-write")
    count = options.count or ROUNDS // 2
    initiator = side.pair.initiator
    initiator.call("open_blocking", config=options.engine, address=side.address_there, length_bytes=MIB)
    ours: list[int] = []
    awaited: list[int] = []
    seconds: list[float] = []
    ratios: list[float] = []
    for turn in range(options.repeats + 1):
        runs = [
            initiator.call(what, op_bytes=SEEN_BYTES, count=count, imm=side.imm)
            for what in ("write_single", "write_blocking")
        ]
        side.note_sent(2 * count)
        if turn > 0:
            awaited += runs[0]["samples_ns"]
            ours += runs[1]["samples_ns"]
            seconds.append(runs[1]["seconds"])
            ratios.append(percentiles_us(runs[1]["samples_ns"])[0] / percentiles_us(runs[0]["samples_ns"])[0])
    side.pair.target.call("wait", target=side.arrivals)
    p50, p99 = percentiles_us(awaited)
    detail = machine | {"limit_p50_us": p50, "limit_p99_us": p99}
    ratio = Rate.of(ratios).median
    _row(options, report, side, "blocking-write", SEEN_BYTES, ours, seconds, count, detail, "awaited_write", ratio)


def _together(options: Options, report: BenchReport, side: FabricSide, machine: dict[str, Any]) -> None:
    report.step(f"{TOGETHER} transfers awaited together")
    side.poison()
    rounds = max(3, (options.count or ROUNDS) // 200)
    seconds: list[float] = []
    samples: list[float] = []
    for turn in range(options.repeats + 1):
        spent = 0.0
        for _ in range(rounds):
            run = side.pair.initiator.call("write_together", op_bytes=TOGETHER_BYTES, count=TOGETHER, imm=side.imm)
            side.note_sent(TOGETHER)
            spent += run["seconds"]
            if turn > 0:
                samples.append(run["seconds"] * 1e9 / TOGETHER)
        if turn > 0:
            seconds.append(spent)
    verified = report.check("transfers awaited together", side.check_writes(TOGETHER_BYTES))
    detail = machine | {"awaited_together": TOGETHER}
    _row(
        options, report, side, "awaited-together", TOGETHER_BYTES, samples, seconds, rounds * TOGETHER, detail,
        verified=verified, window=TOGETHER,
    )  # fmt: skip


def _idle(options: Options, report: BenchReport, side: FabricSide, machine: dict[str, Any]) -> None:
    report.step("idle")
    shares = side.pair.both("idle", seconds=IDLE_SECONDS)
    point = Point(
        bench="notify",
        figure="idle",
        provider=options.provider,
        bytes=0,
        gbytes_per_s=NOTHING,
        ops_per_s=NOTHING,
        verified=True,
        detail=facts(options, side, core_share=significant(max(shares)), **machine),
    )
    report.row(point)


def _ping_pong(
    options: Options, side: FabricSide, ping: str, pong: str, count: int, **more: Any
) -> tuple[list[int], list[float]]:
    samples: list[int] = []
    seconds: list[float] = []
    for turn in range(options.repeats + 1):
        now = _one_ping_pong(side, ping, pong, count, **more)
        if turn > 0:  # the first is the warm-up
            samples += now
            seconds.append(sum(now) / 1e9)
    return samples, seconds


def _one_ping_pong(side: FabricSide, ping: str, pong: str, count: int, **more: Any) -> list[int]:
    side.pair.target.start(pong, imm=side.own_imm, base=side.arrivals, count=count, **more)
    samples: list[int] = side.pair.initiator.call(ping, imm=side.imm, base=side.returns, count=count, **more)
    side.pair.target.finish()
    side.note_sent(count)
    side.returns += count
    return samples


def _row(
    options: Options,
    report: BenchReport,
    side: FabricSide,
    figure: str,
    op_bytes: int,
    samples: list[Any],
    seconds: list[float],
    count: int,
    detail: dict[str, Any],
    limit: str | None = None,
    ratio: float | None = None,
    *,
    verified: bool | None = None,
    window: int = 1,
) -> None:
    p50, p99 = percentiles_us(samples)
    gbytes_per_s, ops_per_s = rates(seconds, count, count * op_bytes)
    if verified is None:
        # Signals carry no bytes: what can be wrong is the number of them.
        verified = report.check(figure, side.check_counts())
    report.row(
        Point(
            bench="notify",
            figure=figure,
            provider=options.provider,
            bytes=op_bytes,
            window=window,
            gbytes_per_s=gbytes_per_s,
            ops_per_s=ops_per_s,
            p50_us=p50,
            p99_us=p99,
            verified=verified,
            limit=limit,
            ratio=ratio,
            detail=facts(options, side) | detail,
        )
    )
