"""A study as tables for people: what is planned, how long it takes, by stage, and what was assumed. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from asyncfabric_services.plan.calibrated import cost_lines, source_lines
from asyncfabric_services.plan.study import Study


def draw_text(study: Study) -> str:
    """Return the tables: what, how long, by stage, and what was assumed."""
    return "\n".join(_lines(study))


def _lines(study: Study) -> Iterator[str]:
    found, trainer, replica = study.summary(), study.cluster.trainer, study.cluster.replica
    skew_s = study.prediction.assumed.skew_s
    yield f"{study.card.name}: {found['model_bytes'] / 1e9:.1f} GB a replica ({study.card.source})"
    yield (
        f"from {trainer.ranks} ranks (stages {trainer.stages}, copies {trainer.copies}, fsdp {trainer.fsdp}, "
        f"ep {trainer.ep}) "
        f"to {study.cluster.replicas} replicas of {replica.ranks} (tp {replica.tp}, {'fp8' if replica.fp8 else 'bf16'})"
    )
    relay = study.plan.relay
    yield (
        f"forwarding: {f'inside nodes of {relay.node_ranks}' if relay.node_ranks else 'none inside nodes'}, "
        f"{f'{relay.width} replicas feed the others' if relay.width else 'trainers feed every replica'}"
    )
    yield ""
    bar = study.error_bar
    rows = [
        ("predicted", f"{found['predicted_seconds']:.3f} s with a skew of {1e3 * skew_s:g} ms between trainers"),
        *(() if bar is None else [("error bar", f"{bar[0]:.3f} to {bar[1]:.3f} s: worst error of the calibration")]),
        *(() if study.published is None else study.published.lines()),
        ("floor of the model", f"{found['floor_seconds']:.3f} s at the nominal rate, each byte once into each replica"),
        ("floor of this placement", f"{found['placement_floor_seconds']:.3f} s at the nominal rate"),
        ("sender imbalance", f"{found['sender_imbalance']:.4f} max/mean"),
        ("receiver imbalance", f"{found['receiver_imbalance']:.4f} max/mean"),
        (
            "plan",
            f"{found['rows']} rows a replica, {found['plan_seconds']:.2f} s ({found['plan_cpu_seconds']:.2f} s of "
            f"processor), {found['plan_peak_bytes'] / 1e6:.0f} MB",
        ),
        ("scratch", f"{found['peak_scratch_bytes'] / 2**20:.0f} MiB at most on a trainer"),
    ]
    yield from (f"{name:<24} {value}" for name, value in rows)
    yield ""
    yield f"{'stage':<24} {'busy, mean':>12} {'busy, most':>12} {'last ends':>12}"
    for name, stage in study.prediction.stages().items():
        yield f"{name:<24} {stage.busy_mean_s:>10.3f} s {stage.busy_max_s:>10.3f} s {stage.last_end_s:>10.3f} s"
    yield ""
    values, calibrated = msgspec.to_builtins(study.prediction.assumed), study.calibrated
    if calibrated is not None:
        yield from cost_lines(calibrated.calibration, calibrated.used)
        yield ""
        yield from source_lines(values, calibrated.measured, calibrated.calibration)
    else:
        yield from source_lines(values, {}, None)
