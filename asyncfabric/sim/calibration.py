"""From measured updates to costs, and how well the simulation then predicts updates that it has not seen. Pure.

Costs come from core time alone, in which every cost is linear. What remains of wall time after simulating the fitted
runs is one more number, `wait_s`. Both are fitted to relative errors, so that short runs count as much as long ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

import msgspec
import numpy as np

from asyncfabric.sim.assumptions import Assumptions
from asyncfabric.sim.costs import COSTS, HostCosts, Hosts
from asyncfabric.sim.fanout import predict
from asyncfabric.sim.labour import THREADS, Labour, SentRuns, Thread, labour_of
from asyncfabric.sim.nonnegative import nonnegative_least_squares
from asyncfabric.sim.workload import workload_of
from asyncfabric.weights.plan.plan import Plan

STEPS = 200
"""Steps of a simulated run, about: more make no difference that could be measured."""


@dataclass(frozen=True, eq=False)
class Run:
    """One shape of update that was measured, or is to be predicted.

    Attributes:
        label: what people call it.
        plan: with its replicas.
        sent: as senders carry its pieces out.
        unit_bytes: of shards, that go through a trainer's stages together.
        cores: that nobody else used meanwhile.
        seconds: measured wall time.
        spent_s: measured core time of all ranks, by thread.
        threads: those whose core time is as it would be elsewhere; of others and of wall time nothing is fitted.
    """

    label: str
    plan: Plan
    sent: SentRuns
    unit_bytes: int
    cores: float
    seconds: float = 0.0
    spent_s: Mapping[Thread, float] = field(default_factory=dict)
    threads: tuple[Thread, ...] = THREADS

    @property
    def whole(self) -> bool:
        """Whether all of it is as it would be elsewhere: the time that it takes can be predicted."""
        return self.threads == THREADS

    def assumed(self, expected_s: float) -> Assumptions:
        """Return what a simulation of it on one machine takes for granted: no rail but the cores."""
        return Assumptions(
            rail_gbits_per_s=1e6,
            rail_efficiency=1.0,
            message_us=0.0,
            offloaded=False,
            convert_gbytes_per_s=1e6,
            node_gbytes_per_s=1e6,
            unit_bytes=self.unit_bytes,
            watermark_bytes=max(1 << 28, 8 * self.unit_bytes),
            skew_s=0.0,
            verify_gbytes_per_s=1e6,
            commit_s=0.0,
            step_s=max(1e-5, expected_s / STEPS),
        )

    @cached_property
    def labour(self) -> Labour:
        """Return how much of everything it does."""
        return labour_of(self.plan, workload_of(self.plan, self.assumed(1.0)), self.sent, shared=not self.whole)


class Judged(msgspec.Struct, frozen=True):
    """A run beside its prediction, in seconds; `error` is predicted / measured - 1."""

    label: str
    cores: float
    measured_s: float
    predicted_s: float
    fitted: bool

    @property
    def error(self) -> float:
        """How far off, as a part of what was measured."""
        return self.predicted_s / self.measured_s - 1


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of the code on one machine.

    Attributes:
        costs: fitted; standard_errors: of each, None where it is 0 because less is not possible.
        wait_s: of an update, that nobody's core time explains.
        op_us: wall time of one of many writes of 64 bytes with immediate and completion, no Python; None: not measured.
        machine, command, provider: where and how it was measured.
        judged: all runs.
    """

    costs: HostCosts
    standard_errors: dict[str, float | None]
    wait_s: float
    op_us: float | None = None
    machine: str = ""
    command: str = ""
    provider: str = ""
    judged: tuple[Judged, ...] = ()

    @property
    def held_out(self) -> tuple[Judged, ...]:
        """The runs that were not fitted."""
        return tuple(each for each in self.judged if not each.fitted)

    @property
    def median_error(self) -> float:
        """Median absolute error of the runs that were not fitted; nan without any."""
        return median(abs(each.error) for each in self.held_out) if self.held_out else float("nan")

    @property
    def worst_error(self) -> float:
        """Largest absolute error of the runs that were not fitted; nan without any."""
        return max((abs(each.error) for each in self.held_out), default=float("nan"))


def fit(runs: Sequence[Run]) -> Calibration:
    """Return the costs that these runs show, and what is left of their wall time.

    A cost of which the runs do nothing, as of casting where nothing was cast, is 0 and has no standard error.

    Raises:
        ValueError: fewer measurements than costs, or runs too alike to distinguish costs; names what is missing.
    """
    found = fit_costs(runs)
    whole = [run for run in runs if run.whole]
    if not whole:
        return found
    left = np.array([run.seconds - expect(run, found.costs) for run in whole])
    weights = np.array([run.seconds for run in whole]) ** -2.0
    return msgspec.structs.replace(found, wait_s=max(0.0, float(left @ weights / weights.sum())))


def fit_costs(runs: Sequence[Run]) -> Calibration:
    """Return the costs alone, without simulating anything; raises as `fit` does."""
    rows, times = [], []
    for run in runs:
        for thread in run.threads:
            counts, spent = run.labour.counts[thread], run.spent_s[thread]
            weight = 1.0 / max(spent, 1e-4 * len(counts))
            rows.append(counts.sum(axis=0) * weight)
            times.append(spent * weight)
    matrix = np.array(rows) if rows else np.zeros((0, len(COSTS)))
    seen = np.flatnonzero(matrix.any(axis=0)) if rows else np.arange(len(COSTS))
    names = [COSTS[number] for number in seen]
    if len(runs) < 2 or len(matrix) < len(seen):
        raise ValueError(f"{len(runs)} runs are too few for {len(seen)} costs: {', '.join(names)}")
    try:
        solution = nonnegative_least_squares(matrix[:, seen], np.array(times))
    except ValueError as error:
        raise ValueError(f"{error}; measure more shapes, sizes and forms (of {', '.join(names)})") from None
    values, errors = np.zeros(len(COSTS)), np.full(len(COSTS), np.nan)
    values[seen], errors[seen] = solution
    return Calibration(
        costs=HostCosts(**dict(zip(COSTS, values.tolist(), strict=True))),
        standard_errors={
            name: float(error) if np.isfinite(error) else None for name, error in zip(COSTS, errors, strict=True)
        },
        wait_s=0.0,
    )


def expect(run: Run, costs: HostCosts, wait_s: float = 0.0) -> float:
    """Return the seconds that a run would take, simulated with cores as the only resource."""
    hosts = Hosts(costs=costs, cores=run.cores)
    floor_s = run.labour.total_s(costs) / run.cores
    return predict(run.plan, run.assumed(floor_s), hosts, run.sent).predicted_s + wait_s


def judge(calibration: Calibration, runs: Sequence[Run], *, fitted: bool) -> tuple[Judged, ...]:
    """Return each measured run beside its prediction, if it is a whole one."""
    return tuple(
        Judged(run.label, run.cores, run.seconds, expect(run, calibration.costs, calibration.wait_s), fitted)
        for run in runs
        if run.whole
    )


def spent_by(labour: Labour, costs: HostCosts) -> dict[Thread, float]:
    """Return the core time of all ranks by thread, as these costs make it."""
    return {thread: float(np.sum(labour.seconds(thread, costs))) for thread in THREADS}
