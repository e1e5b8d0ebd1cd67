"""`bench weights`: updates from trainers to replicas, a process each, against bare copies by as many copiers.

The limit copies at once in all trainer processes, each with one thread, memory to memory, in pieces of what the plan
writes at once; with `--device cuda` it is torch's copy from the trainer's GPU to another, 256 MiB at a time. `write`
counts from when the receivers' memory is open until the last write has ended; `update` is the whole: opening, writing,
checksums at both ends, verifying, the decision on the disk. Bytes are those of the weights, also where a coding sends
fewer.
"""

from __future__ import annotations

from typing import Any

from asyncfabric.bench.measure import paired_ratio
from asyncfabric.bench.rows import Point, rates
from asyncfabric_services.bench.options import Options
from asyncfabric_services.bench.report.report import BenchReport
from asyncfabric_services.bench.weights.setup import open_setup

UNTIL_CODED = 3
"""Versions after the first until a delta can be used: three are measured, the fourth is kept as its base."""

COPY_BYTES = 4 << 20
GPU_COPY_BYTES = 256 << 20
WALK_BYTES = 256 << 20


def run_weights(
    options: Options, report: BenchReport, model: dict[str, Any], scratch_bytes: int, codings: tuple[str, ...] = ()
) -> None:
    """Measure updates of one model; with codings its weights change a little before each."""
    report.expect(options.repeats + 1)
    with open_setup(options, model, scratch_bytes, codings) as setup:
        trainers, started = setup.trainers, setup.started
        report.step("first update")
        setup.update()
        verdicts = setup.check(0)
        for _ in range(UNTIL_CODED if codings else 0):
            setup.nudge()
            setup.update()
        each = setup.moved // model["trainers"]
        op_bytes = GPU_COPY_BYTES if options.on_gpu else COPY_BYTES
        walk = max(op_bytes, min(WALK_BYTES, each // op_bytes * op_bytes))
        setup.ask(trainers, "prepare_copy", length_bytes=walk)
        rounds = max(1, round(each / walk))
        copied = model["trainers"] * walk * rounds
        cpu_s: list[dict[str, float]] = []
        roles = setup.roles
        bare = ("peer_copy",) if options.on_gpu else ("memcpy", "memcpy_nt")
        limit_s: dict[str, list[float]] = {name: [] for name in bare}
        if options.on_gpu:
            setup.ask(trainers, "copy", limit="peer_copy", op_bytes=op_bytes, count=4)
        updates: list[dict[str, Any]] = []
        published: list[dict[str, Any]] = []
        for repeat in range(options.repeats):
            report.step(f"repeat {repeat + 1}")
            for name, seconds in limit_s.items():
                count = walk // op_bytes * rounds  # as long as an update takes, or it sees another machine
                found = setup.ask(trainers, "copy", limit=name, op_bytes=op_bytes, count=count)
                seconds.append(max(found.values()))
            if codings:
                setup.nudge()
            before = setup.ask(started, "cpu")
            reported, parts = setup.update()
            after = setup.ask(started, "cpu")
            cpu_s.append({role: sum(after[name] - before[name] for name in names) for role, names in roles.items()})
            updates.append(reported)
            published += parts
        setup.ask(trainers, "train", seed=1)
        setup.update()
        verdicts += setup.check(1)
    verified = report.check("weights", "; ".join(verdict for verdict in verdicts if verdict))
    moved = setup.moved
    fastest = min(limit_s, key=lambda name: sum(limit_s[name]))
    costs = [seconds / copied for seconds in limit_s[fastest]]
    for figure, key in (("write", "write_s"), ("update", "seconds")):
        seconds = [each[key] for each in updates]
        gbytes_per_s, per_s = rates(seconds, 1, moved)
        limit_rate, _ = rates(limit_s[fastest], 1, copied)
        report.row(
            Point(
                bench="weights",
                figure=figure,
                provider=options.provider,
                bytes=moved,
                processes=len(started),
                gbytes_per_s=gbytes_per_s,
                ops_per_s=per_s,
                verified=verified,
                limit=fastest,
                ratio=paired_ratio(costs, [each / moved for each in seconds]),
                detail={
                    **model,
                    "device": options.device,
                    "limit_gbytes_per_s": limit_rate.as_row(),
                    "stages": {
                        name: round(_median([part["stages"][name] for part in published]), 4)
                        for name in ("convert_s", "checksum_s", "staging_wait_s", "maxima_wait_s")
                    }
                    | {
                        name: round(_median([each[name] for each in updates]), 4)
                        for name in ("seconds", "prepare_s", "write_s", "verify_s", "decide_s")
                    },
                    "cpu_s": {role: round(_median([each[role] for each in cpu_s]), 3) for role in roles},
                    "writes": sum(part["stages"]["writes"] for part in published[-model["trainers"] :]),
                    "codings": _used(updates[-1]["codings"]),
                    "staged_bytes": max(part["staged_bytes"] for part in published),
                },
            )
        )


def _used(codings: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the bytes and what was sent of them, by coding and by whether a replica forwarded it, and why."""
    found: dict[str, Any] = {}
    for one in codings:
        name = f"forwarded {one['coding']}" if "/" in one["sender"] else one["coding"]
        entry = found.setdefault(name, {"pairs": 0, "plain_bytes": 0, "sent_bytes": 0, "why": one["why"]})
        entry["pairs"] += 1
        entry["plain_bytes"] += one["plain_bytes"]
        entry["sent_bytes"] += one["sent_bytes"]
    return found


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
