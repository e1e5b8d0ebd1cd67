"""`bench scatter`: one call to 1..64 targets with odd lengths; the targets are fabrics in few processes."""

from __future__ import annotations

from contextlib import ExitStack

from asyncfabric.bench.measure import percentiles_us, significant
from asyncfabric.bench.rows import Point, rates
from asyncfabric_services.bench.options import KIB, Options
from asyncfabric_services.bench.pair import Process
from asyncfabric_services.bench.report.report import BenchReport

HOSTS = 2
ROUNDS = 500
SCATTER_IMM = 77
LENGTH_BYTES = 4 * KIB


def odd_lengths(targets: int, stride: int) -> list[int]:
    """Return a length for each target, none of them round, all below `stride`."""
    return [stride - 1 - 37 * (index % 16) for index in range(targets)]


def run_scatter(options: Options, report: BenchReport, target_counts: tuple[int, ...]) -> None:
    """Open the most targets that are asked for once, then scatter to the first n of them for each n."""
    most = max(target_counts)
    stride = LENGTH_BYTES
    lengths = odd_lengths(most, stride)
    shares = [len(range(host, most, HOSTS)) for host in range(min(HOSTS, most))]
    report.expect(len(target_counts) + 1)
    with ExitStack() as stack:
        hosts = [
            stack.enter_context(Process("scatter", f"receiver {n}", options.deadline_at)) for n in range(len(shares))
        ]
        sender = stack.enter_context(Process("scatter", "sender", options.deadline_at))
        report.step(f"opening {most} receiving fabrics")
        for host, share in zip(hosts, shares, strict=True):
            host.start("receive_open", config=options.engine, fabrics=share, room_bytes=stride, imm=SCATTER_IMM)
        # Targets are numbered host by host, so that each host knows its part of the list by its first index.
        ends = [end for host in hosts for end in host.finish()]
        sender.call("send_open", config=options.engine, ends=ends, lengths=lengths, stride=stride, seed=options.seed)
        counted = [0] * most
        for targets in sorted(target_counts):
            report.step(f"scatter to {targets}")
            _one_width(options, report, sender, hosts, shares, targets, lengths, stride, counted)


def _one_width(
    options: Options,
    report: BenchReport,
    sender: Process,
    hosts: list[Process],
    shares: list[int],
    targets: int,
    lengths: list[int],
    stride: int,
    counted: list[int],
) -> None:
    count = options.count or ROUNDS
    samples: list[int] = []
    seconds: list[float] = []
    for turn in range(options.repeats + 1):
        now = sender.call("scatter", targets=targets, count=count, imm=SCATTER_IMM)
        for target in range(targets):
            counted[target] += count
        if turn > 0:  # the first is the warm-up
            samples += now
            seconds.append(sum(now) / 1e9)
    verified = True
    first = 0
    for host, share in zip(hosts, shares, strict=True):
        reached = max(0, min(share, targets - first))
        if reached:
            host.call("receive_wait", counts=counted[first : first + reached])
        # Earlier, narrower scatters wrote the same bytes to the first targets; the others must still be poison.
        verdict = host.call(
            "receive_check", first=first, fabrics=reached, lengths=lengths, stride=stride, seed=options.seed
        )
        verified &= report.check(f"scatter to {targets}", verdict)
        first += share
    moved = sum(lengths[:targets])
    gbytes_per_s, ops_per_s = rates(seconds, count, count * moved)
    p50, p99 = percentiles_us(samples)
    report.row(
        Point(
            bench="scatter",
            figure="scatter",
            provider=options.provider,
            bytes=stride,
            processes=1 + len(hosts),
            gbytes_per_s=gbytes_per_s,
            ops_per_s=ops_per_s,
            p50_us=p50,
            p99_us=p99,
            verified=verified,
            detail={
                "targets": targets,
                "us_per_target": significant(p50 / targets),
                "rails": options.rails,
                "polling": options.polling,
                "level": "python",
            },
        )
    )
