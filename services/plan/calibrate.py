"""`asyncfabric plan calibrate`: real updates on this machine, costs fitted to some of them, the others predicted.

Status 0 whatever the error is: it is printed. 1 when an update brought wrong bytes, 2 when the runs are too few.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from asyncfabric_services.bench.options import PROVIDERS
from asyncfabric_services.exits import FINE
from asyncfabric_services.output_file import OutputFile
from asyncfabric_services.plan.calibrated import cost_lines, error_line
from asyncfabric_services.quantities import DurationType

if TYPE_CHECKING:
    from asyncfabric.sim.calibration import Calibration, Run

SHAPE = "TRAINERS:RECEIVERS:BYTES:FORM[:ROWS[:TOGETHER]]"


@click.command()
@click.option("--provider", type=click.Choice(PROVIDERS), default="local", show_default=True)
@click.option("--fit", "fitted", multiple=True, metavar=SHAPE, help="An update to fit; repeat. Default: 16 shapes.")
@click.option(
    "--hold", "held", multiple=True, metavar=SHAPE, help="An update to predict; repeat. Default: eight others."
)
@click.option("--repeats", type=click.IntRange(1, 1000), default=5, show_default=True, help="Updates of each shape.")
@click.option("--out", type=OutputFile(), help="File for `--calibration`.")
@click.option("--ops/--no-ops", default=True, show_default=True, help="Measure one small write by itself, too.")
@click.option("--deadline", type=DurationType(), default="1800s", show_default=True, help="Give up after this.")
@click.option("--json", "as_json", is_flag=True, help="Print what the file has.")
def calibrate(
    provider: str,
    fitted: tuple[str, ...],
    held: tuple[str, ...],
    repeats: int,
    out: Path | None,
    ops: bool,
    deadline: float,
    as_json: bool,
) -> int:
    """Measure what updates cost this machine, and how well the model then predicts others."""
    from asyncfabric.sim.calibration import fit, judge
    from asyncfabric_services.bench.options import Options
    from asyncfabric_services.plan.measure import HOLD, TRAIN, MeasuredShape, measure, op_us

    fitted, held = fitted or TRAIN, held or HOLD
    for text in (*fitted, *held):
        MeasuredShape.of(text)
    options = Options(provider=provider, repeats=repeats, deadline=deadline)
    runs: dict[bool, list[Run]] = {True: [], False: []}
    turns = [(text, fits) for pair in zip_longest(fitted, held) for text, fits in zip(pair, (True, False), strict=True)]
    turns = [(text, fits) for text, fits in turns if text]  # in turn: what the machine does meanwhile meets both alike
    for number, (text, fits) in enumerate(turns, 1):
        click.echo(f"{number} of {len(turns)}: {text}", err=True)
        runs[fits].append(measure(text, options))
    try:
        found = fit(runs[True])
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    judged = judge(found, runs[True], fitted=True) + judge(found, runs[False], fitted=False)
    found = msgspec.structs.replace(
        found,
        judged=judged,
        op_us=op_us(options) if ops else None,
        provider=provider,
        machine=machine(),
        command=" ".join(["asyncfabric", *sys.argv[1:]]),
    )
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
        click.echo(f"calibration: {out}", err=True)
    click.echo(json.dumps(msgspec.to_builtins(found)) if as_json else "\n".join(lines(found)))
    return FINE


def machine() -> str:
    """Return what kind of machine this is, in words."""
    info = Path("/proc/cpuinfo")
    names = (line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name"))
    load = os.getloadavg()[0]
    return f"{len(os.sched_getaffinity(0))} cores of {next(names, platform.machine())}, load {load:.1f} at the end"


def lines(found: Calibration) -> Iterator[str]:
    """Yield the tables: each run, the error, the costs."""
    yield f"{found.provider} on {found.machine}"
    yield ""
    yield f"{'update':<24} {'':<9} {'free cores':>10} {'measured':>12} {'predicted':>12} {'error':>8}"
    for each in found.judged:
        yield (
            f"{each.label:<24} {'fitted' if each.fitted else 'held out':<9} {each.cores:>10.2f} "
            f"{each.measured_s * 1e3:>9.1f} ms {each.predicted_s * 1e3:>9.1f} ms {each.error:>+8.1%}"
        )
    yield ""
    yield error_line(found)
    yield ""
    yield from cost_lines(found)
