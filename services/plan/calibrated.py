"""What a calibration file changes in a prediction, and how that is shown. Reads the file; the rest is pure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from asyncfabric.sim.calibration import Calibration
from asyncfabric.sim.costs import COSTS, Hosts
from asyncfabric.unreadable import UNREADABLE

NOT_CALIBRATED = (
    "not calibrated: no number of this was compared with a measured update; see `asyncfabric plan calibrate`"
)


def read(path: Path) -> Calibration:
    """Return a calibration; raises click.BadParameter for a file that is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Calibration)
    except UNREADABLE as error:
        raise click.BadParameter(f"{path} is no calibration: {error}", param_hint="--calibration") from None


def measured_assumptions(found: Calibration, cores: float | None) -> dict[str, Any]:
    """Return the assumptions of updates that the measurement replaces.

    Args:
        found: the calibration.
        cores: of each rank, where the processor does all the work; None: GPUs and NICs do theirs.
    """
    values: dict[str, Any] = {"commit_s": found.wait_s}
    if found.op_us is not None:
        values["message_us"] = found.op_us
    if cores is not None:  # the costs of the processor state how fast these are
        values |= {"offloaded": False, "convert_gbytes_per_s": 1e6, "verify_gbytes_per_s": 1e6}
    return values


def hosts_of(found: Calibration, cores: float | None) -> Hosts:
    """Return the machines of a cluster: one for each rank. Without `cores` every thread has a core of its own."""
    if cores is None:
        return Hosts(costs=found.costs.beside_devices(found.op_us), cores=3.0, ranks=1, one_interpreter=True)
    return Hosts(costs=found.costs, cores=cores, ranks=1)


def error_line(found: Calibration) -> str:
    """Return the error of the runs that were not fitted."""
    if not found.held_out:
        return "calibration error: unknown, no run was held out"
    return (
        f"calibration error, {len(found.held_out)} runs that were not fitted: median {found.median_error:.1%}, "
        f"worst {found.worst_error:.1%}"
    )


def cost_lines(found: Calibration, used: tuple[str, ...] = COSTS) -> Iterator[str]:
    """Yield the costs with their standard errors; `used` are those that a prediction takes into account."""
    yield "measured costs, core time"
    for name in COSTS:
        error = found.standard_errors[name]
        states = f"+- {error:.3g}" if error is not None else "not distinguishable from 0, or not done in any run"
        yield f"  {name:<22} {getattr(found.costs, name):<12.4g} {states}{'' if name in used else ', not used here'}"
    yield f"  {'wait_s':<22} {found.wait_s:<12.4g} wall time of an update that no core time explains"
    if found.op_us is not None:
        yield f"  {'op_us':<22} {found.op_us:<12.4g} one write of 64 bytes, its immediate and its completion"


def source_lines(values: dict[str, Any], measured: dict[str, Any], found: Calibration | None) -> Iterator[str]:
    """Yield every assumption, and whether it was measured; last how well that predicts."""
    yield "assumed"
    for name, value in values.items():
        here = name in measured and measured[name] == value
        yield f"  {name:<22} {value!s:<12} {'measured' if here else ''}".rstrip()
    yield ""
    if found is None:
        yield NOT_CALIBRATED
        return
    yield f"measured over {found.provider} on {found.machine}; everything else above is assumed"
    yield error_line(found) + ", on that machine: of a cluster this shows nothing"


def calibration_summary(found: Calibration | None, measured: dict[str, Any]) -> dict[str, Any] | None:
    """Return plain values: what was measured, and the error; None without a calibration."""
    if found is None:
        return None
    return {
        "measured": sorted(measured),
        "costs": msgspec.to_builtins(found.costs),
        "held_out_runs": len(found.held_out),
        "median_error": round(found.median_error, 4) if found.held_out else None,
        "worst_error": round(found.worst_error, 4) if found.held_out else None,
        "machine": found.machine,
        "provider": found.provider,
    }
