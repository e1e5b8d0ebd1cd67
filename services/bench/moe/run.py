"""`bench moe`: dispatch and combine between processes, against gloo in the same run.

Three comparisons, each our speed over gloo's. `payload_ratio`: with gloo's all_to_all of the same payload, there and
back, one row for each choice of a token as all_to_all needs it. `ratio`: with that of only the rows that ours puts on
the wire, one for each rank that a token goes to. Neither packs, groups or adds anything. `exchange_ratio`: with the
same job done with gloo.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from asyncfabric.bench.measure import percentiles_us
from asyncfabric.bench.rows import Point, rates
from asyncfabric_services.bench.options import Options
from asyncfabric_services.bench.pair import Process, all_of, answers_of
from asyncfabric_services.bench.race import Contender, Repeat, race, speed_ratio
from asyncfabric_services.bench.report.report import BenchReport

COUNTED_STEPS = 4
"""Steps whose work requests, immediates and bytes are compared with the protocol's."""


def run_moe(options: Options, report: BenchReport, shapes: list[dict[str, Any]]) -> None:
    """Measure each shape; they differ in the number of tokens."""
    report.expect(len(shapes))
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        ranks = [
            stack.enter_context(Process("moe", f"rank {rank}", options.deadline_at))
            for rank in range(shapes[0]["ranks"])
        ]
        opened = all_of(ranks, "open", config=options.engine)
        addresses = [each["address"] for each in opened]
        for rank, process in enumerate(ranks):
            process.start("join", addresses=addresses, rank=rank, meeting=str(Path(folder) / "gloo"))
        answers_of(ranks)
        for shape in shapes:
            report.step(f"{shape['max_tokens']} tokens")
            _one_size(options, report, ranks, shape, opened[0])


def _one_size(
    options: Options, report: BenchReport, ranks: list[Process], shape: dict[str, Any], rail: dict[str, Any]
) -> None:
    tokens = shape["max_tokens"]
    plans = all_of(ranks, "shape", shape=shape, tag=f"{tokens} tokens", seed=options.seed)
    verdicts = all_of(ranks, "check", seed=options.seed + 1)
    samples: dict[str, list[int]] = {"dispatch_ns": [], "combine_ns": []}

    def steps(count: int) -> float:
        runs = all_of(ranks, "steps", count=count)
        for name, pooled in samples.items():
            for run in runs:
                pooled.extend(run[name])
        return max(float(run["seconds"]) for run in runs)

    def gloo(command: str, **arguments: Any) -> Repeat:
        return lambda count: max(float(run["seconds"]) for run in all_of(ranks, command, count=count, **arguments))

    def forget(_: Contender) -> None:
        for pooled in samples.values():
            pooled.clear()

    ours, theirs = Contender("asyncfabric", steps), Contender("gloo", gloo("gloo", which="wire"))
    payload = Contender("gloo-payload", gloo("gloo", which="payload"))
    same_job = Contender("gloo-exchange", gloo("gloo_exchange"))
    race(
        [theirs, payload, same_job, ours],
        repeats=options.repeats,
        duration=options.duration,
        count=options.count,
        on_start=forget,
    )
    verdicts += all_of(ranks, "check", seed=options.seed + 2)
    verdicts.append(_counted(ranks, plans))
    rows_bytes = sum(plan["rows_bytes"] for plan in plans)
    gbytes_per_s, steps_per_s = rates(ours.seconds, ours.count, ours.count * rows_bytes)
    gloo_gbytes, _ = rates(theirs.seconds, theirs.count, theirs.count * rows_bytes)
    whole = [there + back for there, back in zip(samples["dispatch_ns"], samples["combine_ns"], strict=True)]
    p50, p99 = percentiles_us(whole)
    wrong = "; ".join(verdict for verdict in verdicts if verdict)
    ratios = {
        "ratio": speed_ratio(ours, theirs),
        "payload_ratio": speed_ratio(ours, payload),
        "exchange_ratio": speed_ratio(ours, same_job),
    }
    cores = len(os.sched_getaffinity(0))
    report.note(named(ratios, tokens, len(ranks), cores))
    report.row(
        Point(
            bench="moe",
            figure="dispatch-combine",
            provider=options.provider,
            bytes=rows_bytes // len(ranks),
            processes=len(ranks),
            gbytes_per_s=gbytes_per_s,
            ops_per_s=steps_per_s,
            p50_us=p50,
            p99_us=p99,
            verified=report.check(f"{tokens} tokens", wrong),
            limit="gloo",
            ratio=ratios.pop("ratio"),
            detail={
                "tokens": tokens,
                **{name: shape[name] for name in ("hidden", "top_k", "num_experts", "in_dtype", "out_dtype")},
                "polling": options.polling,
                "dispatch_us": percentiles_us(samples["dispatch_ns"])[0],
                "combine_us": percentiles_us(samples["combine_ns"])[0],
                "gloo_us": percentiles_us([cost * 1e9 for cost in theirs.costs])[0],
                "gloo_payload_us": percentiles_us([cost * 1e9 for cost in payload.costs])[0],
                "gloo_exchange_us": percentiles_us([cost * 1e9 for cost in same_job.costs])[0],
                **ratios,
                "cores": cores,
                "limit_gbytes_per_s": gloo_gbytes.as_row(),
                "payload_bytes": sum(plan["payload_bytes"] for plan in plans) // len(ranks),
                "requests_per_step": [plan["requests"] for plan in plans],
                "bytes_per_step": [plan["bytes"] for plan in plans],
                "buffer_bytes": max(plan["buffer_bytes"] for plan in plans),
                **{name: rail[name] for name in ("library", "version") if rail[name]},
            },
        )
    )


def named(ratios: Mapping[str, float], tokens: int, processes: int, cores: int) -> str:
    """Return the three ratios, each with what it compares with."""
    return (
        f"{tokens} tokens, {processes} processes on {cores} cores: {ratios['ratio']:.2f} of the speed of gloo's "
        f"all_to_all of the same rows that ours sends (ratio), {ratios['payload_ratio']:.2f} of that of one row for "
        f"each choice of a token (payload_ratio), {ratios['exchange_ratio']:.2f} of the same job over gloo "
        "(exchange_ratio)"
    )


def _counted(ranks: list[Process], plans: list[dict[str, int]]) -> str:
    """Compare what the engines count in some steps with what the protocol states; "" is good."""
    before = all_of(ranks, "statistics")
    all_of(ranks, "steps", count=COUNTED_STEPS - 1)  # one more begins the measurement
    after = all_of(ranks, "statistics")
    wanted_bytes = all_of(ranks, "engine_bytes")
    for rank, plan in enumerate(plans):
        # Immediates report how many writes there were; a long write may be several work requests of the rail.
        found = after[rank]["immediates_sent"] - before[rank]["immediates_sent"]
        wanted = COUNTED_STEPS * plan["requests"]
        if found != wanted:
            return f"rank {rank} made {found} writes, the protocol states {wanted}"
        written = after[rank]["bytes_written"] - before[rank]["bytes_written"]
        if written != COUNTED_STEPS * wanted_bytes[rank]:
            return f"rank {rank} wrote {written} bytes, the protocol states {COUNTED_STEPS * wanted_bytes[rank]}"
    return ""
