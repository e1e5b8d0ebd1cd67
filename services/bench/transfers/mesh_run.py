"""`bench mesh`: all processes write at the same time, in a ring and from all to all, against send and recv of torch.

With `--device cuda` there is a process for each GPU and the rival is NCCL, otherwise gloo. Rates are those of all
processes together.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from asyncfabric.bench.rows import Point, rates
from asyncfabric_services.bench.options import Options
from asyncfabric_services.bench.pair import Process, all_of, answers_of
from asyncfabric_services.bench.race import Contender, Repeat, race, speed_ratio
from asyncfabric_services.bench.report.report import BenchReport
from asyncfabric_services.exits import EnvironmentUnfit
from asyncfabric_services.quantities import format_size

PATTERNS = ("ring", "all-to-all")
HOST_PROCESSES = 4


def run_mesh(options: Options, report: BenchReport, processes: int | None) -> None:
    """Measure each size in each pattern."""
    with ExitStack() as stack:

        def begin(rank: int) -> Process:
            return stack.enter_context(Process("mesh", f"rank {rank}", options.deadline_at))

        first = begin(0)
        count = processes or (first.call("gpus") if options.on_gpu else HOST_PROCESSES)
        if count < 2:
            raise EnvironmentUnfit("bench mesh needs two processes: on one GPU ask for them by --processes 2")
        ranks = [first, *(begin(rank) for rank in range(1, count))]
        report.expect(len(PATTERNS) * len(options.sizes))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for rank, process in enumerate(ranks):
            process.start("open", config=options.engine, rank=rank)
        opened = answers_of(ranks)
        for rank, process in enumerate(ranks):
            process.start("join", rank=rank, ranks=count, meeting=str(Path(folder) / "group"), most=max(options.sizes))
        cards = answers_of(ranks)
        all_of(ranks, "meet", addresses=[each["address"] for each in opened], cards=cards)
        for size in options.sizes:
            for pattern in PATTERNS:
                report.step(f"{pattern} of {format_size(size)}")
                _one(options, report, ranks, pattern, size, opened[0])
        for process in ranks:
            process.hang_up()  # a process group of NCCL is left by all at once


def _one(
    options: Options, report: BenchReport, ranks: list[Process], pattern: str, size: int, rail: dict[str, str]
) -> None:
    def repeat(command: str) -> Repeat:
        return lambda count: max(all_of(ranks, command, pattern=pattern, op_bytes=size, count=count))

    wrong = all_of(ranks, "check", pattern=pattern, op_bytes=size)
    ours, theirs = Contender("asyncfabric", repeat("write")), Contender("rival", repeat("rival"))
    race([theirs, ours], repeats=options.repeats, duration=options.duration, count=options.count)
    wrong += all_of(ranks, "check", pattern=pattern, op_bytes=size)
    peers = len(ranks) - 1 if pattern == "all-to-all" else 1
    moved = len(ranks) * peers * size
    gbytes_per_s, ops_per_s = rates(ours.seconds, ours.count * len(ranks) * peers, ours.count * moved)
    rival_gbytes, _ = rates(theirs.seconds, theirs.count, theirs.count * moved)
    rival = "nccl" if options.on_gpu else "gloo"
    report.row(
        Point(
            bench="mesh",
            figure=pattern,
            provider=options.provider,
            bytes=size,
            processes=len(ranks),
            gbytes_per_s=gbytes_per_s,
            ops_per_s=ops_per_s,
            verified=report.check(f"{pattern} of {format_size(size)}", "; ".join(filter(None, wrong))),
            limit=f"{rival}-send-recv",
            ratio=speed_ratio(ours, theirs),
            detail={
                "polling": options.polling,
                "limit_gbytes_per_s": rival_gbytes.as_row(),
                **{name: rail[name] for name in ("library", "version") if rail[name]},
            },
        )
    )
