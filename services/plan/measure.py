"""Real updates between processes of this machine, with the core time of each thread: what a calibration is made of.

Means over several updates. What other programs compute meanwhile is counted by the kernel, in ticks, and taken off the
cores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from asyncfabric.sim.calibration import Run
from asyncfabric.sim.labour import THREADS, Thread
from asyncfabric.weights.memory.host import HostDevice
from asyncfabric.weights.memory.tiles import TILE_BYTES
from asyncfabric.weights.sender.scratch import PAGE_ENTRY_BYTES, PAGES_IN_FLIGHT, UNITS_STAGED
from asyncfabric_services.bench.options import Options
from asyncfabric_services.bench.report.report import BenchReport
from asyncfabric_services.bench.transfers.write_run import run_write
from asyncfabric_services.bench.weights.setup import WeightsSetup, open_setup
from asyncfabric_services.bench.weights.workload import FORMS, plan_of
from asyncfabric_services.exits import CheckFailed, EnvironmentUnfit
from asyncfabric_services.plan.runs import sent_runs
from asyncfabric_services.quantities import SizeType

SCRATCH_BYTES = 320 << 20

CROWD_UNIT_BYTES = 64 << 10
"""Of trainers who share a process: what matters is how many messages they send."""

CROWD_THREADS: tuple[Thread, ...] = (
    "trainer loop",
    "receiver loop",
    "receiver work",
    "coordinator begins",
    "coordinator",
)
"""What there is as it would be with a process for each trainer; converting and writing so little is not."""

ITEMS = {"copy": 1, "cast": 2, "fp8": 2}
"""Bytes of the shard for each that is written."""

TRAIN = (
    "2:2:64MiB:copy",
    "2:2:256MiB:copy:1024",
    "2:1:128MiB:copy",
    "4:2:128MiB:copy",
    "2:2:64MiB:cast",
    "2:1:64MiB:cast",
    "2:2:16MiB:fp8:1024",
    "4:2:32MiB:fp8:1024",
    "8:6:32MiB:copy:1024",
    "64:2:32MiB:cast:1024:32",
    "64:2:8MiB:cast:512:32",
    "64:2:64MiB:cast:1024:32",
    "32:1:16MiB:cast:1024:32",
    "96:2:24MiB:cast:1024:48",
    "96:2:6MiB:cast:512:48",
    "16:1:8MiB:cast:512:16",
)
HOLD = (
    "2:2:512MiB:copy",
    "2:2:128MiB:copy:4096",
    "2:1:256MiB:copy",
    "4:2:256MiB:copy",
    "4:2:128MiB:cast",
    "2:2:128MiB:cast:1024",
    "2:1:32MiB:fp8",
    "2:2:64MiB:fp8",
)


@dataclass(frozen=True, slots=True)
class MeasuredShape:
    """One update: trainers, receivers of one replica, bytes of the model, form, rows of a matrix.

    `together` trainers share a process and send many messages: what these cost receivers and the coordinator is seen.
    """

    trainers: int
    receivers: int
    model_bytes: int
    form: str
    side: int
    together: int = 1

    @classmethod
    def of(cls, text: str) -> MeasuredShape:
        """Read TRAINERS:RECEIVERS:BYTES:FORM[:SIDE[:TOGETHER]]; raises click.BadParameter."""
        parts = text.split(":")
        try:
            side, together = (int(one) for one in (parts[4:] + ["2048", "1"][len(parts) - 4 :]))
            shape = cls(
                int(parts[0]), int(parts[1]), SizeType().convert(parts[2], None, None), parts[3], side, together
            )
            if together > 0 and shape.form in FORMS and min(shape.trainers, shape.receivers) > 0:
                plan_of(**shape.model)
                return shape
        except (ValueError, IndexError, click.BadParameter):
            pass
        raise click.BadParameter(
            f"{text!r} is not TRAINERS:RECEIVERS:BYTES:{'|'.join(FORMS)}[:ROWS OF A MATRIX[:TRAINERS IN A PROCESS]]"
        )

    @property
    def unit_bytes(self) -> int:
        """Written bytes that go through a trainer's stages together."""
        return CROWD_UNIT_BYTES if self.together > 1 else HostDevice().unit_bytes

    @property
    def scratch_bytes(self) -> int:
        """The bound that makes units so large."""
        if self.together == 1:
            return SCRATCH_BYTES
        box = -(-self.side // self.trainers) * self.side * 4
        return TILE_BYTES + 2 * box + PAGES_IN_FLIGHT * PAGE_ENTRY_BYTES + UNITS_STAGED * CROWD_UNIT_BYTES

    @property
    def model(self) -> dict[str, Any]:
        """The model as `bench weights` takes it."""
        each = self.side * self.side * (1 if self.form == "fp8" else 2)
        return {
            "trainers": self.trainers,
            "receivers": self.receivers,
            "replicas": 1,
            "side": self.side,
            "form": self.form,
            "matrices": max(2, -(-self.model_bytes // each) // 2 * 2),
        }


def measure(text: str, options: Options) -> Run:
    """Run one shape and return what it took; raises CheckFailed when what arrived is wrong."""
    shape = MeasuredShape.of(text)
    plan = plan_of(**shape.model)
    seconds: list[float] = []
    spent: list[dict[Thread, float]] = []
    others = between = 0.0
    cores = len(os.sched_getaffinity(0))
    with open_setup(options, shape.model, shape.scratch_bytes, together=shape.together) as setup:
        setup.update()
        wrong = [verdict for verdict in setup.check(0) if verdict]
        if wrong:
            raise CheckFailed(f"{text}: {'; '.join(wrong)}")
        for _ in range(options.repeats):
            before, busy, begin = threads(setup), busy_s(), time.monotonic()
            reported, _ = setup.update()
            took, busy_after, after = time.monotonic() - begin, busy_s(), threads(setup)
            seconds.append(reported["seconds"])
            spent.append({name: after[name] - before[name] for name in after})
            spent[-1]["coordinator begins"] = reported["prepare_core_s"]
            spent[-1]["coordinator"] -= reported["prepare_core_s"]
            between += took
            others += busy_after - busy - sum(spent[-1].values())
    free = max(0.1, cores - max(0.0, others) / between)
    means = {name: fmean(each[name] for each in spent) for name in spent[0]}
    return Run(
        text,
        plan,
        sent_runs(plan, rail_gathers(options)),
        shape.unit_bytes * ITEMS[shape.form],
        free,
        fmean(seconds),
        means,
        THREADS if shape.together == 1 else CROWD_THREADS,
    )


def rail_gathers(options: Options) -> bool:
    """Return whether trainers leave what needs no conversion to their rail."""
    return options.provider == "local"


def threads(setup: WeightsSetup) -> dict[Thread, float]:
    """Return the core time of all processes so far, by role and thread."""
    found = setup.ask(setup.started, "threads")

    def total(names: Sequence[str], thread: str) -> float:
        return sum(float(found[name][thread]) for name in names)

    return {
        "trainer loop": total(setup.trainers, "loop"),
        "trainer engine": total(setup.trainers, "engine"),
        "trainer work": total(setup.trainers, "work"),
        "receiver loop": total(setup.receivers, "loop"),
        "receiver engine": total(setup.receivers, "engine"),
        "receiver work": total(setup.receivers, "work"),
        "coordinator begins": 0.0,  # its report has it
        "coordinator": sum(total(setup.roles["coordinator"], thread) for thread in ("loop", "engine", "work")),
    }


def busy_s() -> float:
    """Return the core seconds that everybody has computed on the cores that this process may use."""
    mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *columns = line.split()
        if name in mine:
            user, nice, system, _, _, irq, softirq, steal = (int(column) for column in columns[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def op_us(options: Options) -> float | None:
    """Return the microseconds of one write of 64 bytes with its immediate and completion, 64 in flight, no Python.

    Of all repeats the fastest, which other programs disturbed least. None where the engine alone cannot be driven over
    this provider.
    """
    report = BenchReport(as_json=False, plot=None, title="a write, an immediate, a completion")
    try:
        run_write(replace(options, engine_level=True, sizes=(64,), window=64, duration=0.1, repeats=9), report)
    except EnvironmentUnfit:
        return None
    finally:
        report.close()
    return 1e6 / float(report.rows[0]["ops_per_s"]["max"])
