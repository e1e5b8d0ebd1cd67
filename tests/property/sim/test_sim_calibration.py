"""Calibration: costs are found again from runs that the simulation made, noise is reported, too few runs refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncfabric.sim import HostCosts, Hosts, Run, expect, fit, judge
from asyncfabric.sim.calibration import fit_costs, spent_by
from asyncfabric.sim.costs import COSTS
from asyncfabric.sim.labour import THREADS
from asyncfabric.sim.nonnegative import nonnegative_least_squares
from asyncfabric.sim.processor import grant
from asyncfabric_services.bench.weights.workload import plan_of
from asyncfabric_services.plan.measure import CROWD_THREADS
from asyncfabric_services.plan.runs import sent_runs

SHAPES = (
    (2, 2, 8, 256, "copy"),
    (2, 1, 4, 512, "copy"),
    (4, 2, 4, 512, "copy"),
    (2, 2, 4, 256, "cast"),
    (1, 1, 6, 512, "fp8"),
    (2, 2, 2, 512, "fp8"),
    (6, 1, 8, 128, "cast"),
)
HELD = (4, 1, 4, 512, "cast")
KNOWN = {
    "write_s_per_gb": 0.3,
    "write_us": 0.4,
    "receive_s_per_gb": 0.2,
    "checksum_s_per_gb": 0.15,
    "gather_s_per_gb": 0.2,
    "box_s_per_gb": 0.1,
    "cast_s_per_gb": 2.0,
    "fp8_s_per_gb": 20.0,
    "unit_ms": 0.5,
    "message_ms": 0.3,
    "report_ms": 0.4,
    "opened_ms": 0.2,
    "row_us": 9.0,
    "process_ms": 3.0,
    "shared_ms": 2.0,
    "begin_message_ms": 0.4,
    "end_message_ms": 0.3,
    "update_ms": 3.0,
}


@cache
def shape(trainers: int, receivers: int, matrices: int, side: int, form: str) -> Run:
    plan = plan_of(trainers, receivers, 1, matrices, side, form)
    whole = THREADS if side > 128 else CROWD_THREADS
    sent = sent_runs(plan, gathers=receivers == 1)  # some by the rail, so that both ways are seen
    return Run(f"{trainers}:{receivers}:{form}", plan, sent, 1 << 18, cores=2.0, threads=whole)


def made(costs: HostCosts, wait_s: float | None = None, noise: float = 0.0, seed: int = 0) -> list[Run]:
    """Return runs as they would be measured on a machine with these costs; without `wait_s` all take a second."""
    draw = np.random.default_rng(seed)
    runs = []
    for each in SHAPES:
        run = shape(*each)
        spent = {name: value * draw.lognormal(0, noise) for name, value in spent_by(run.labour, costs).items()}
        runs.append(replace(run, seconds=1.0 if wait_s is None else expect(run, costs, wait_s), spent_s=spent))
    return runs


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.2, 5.0), min_size=len(COSTS), max_size=len(COSTS)))
def test_costs_are_found_again(factors: list[float]) -> None:
    known = HostCosts(**{name: KNOWN[name] * factor for name, factor in zip(COSTS, factors, strict=True)})
    assert np.allclose(fit_costs(made(known)).costs.values, known.values, rtol=1e-6)


@pytest.mark.slow
def test_the_simulations_own_runs_are_predicted() -> None:
    known = HostCosts(**KNOWN)
    found = fit(made(known, wait_s=0.01))
    assert found.wait_s == pytest.approx(0.01, rel=1e-3)
    held = replace(shape(*HELD), seconds=expect(shape(*HELD), known, 0.01))
    (judged,) = judge(found, [held], fitted=False)
    assert judged.error == pytest.approx(0.0, abs=1e-3) and not judged.fitted


def test_noise_is_reported() -> None:
    known = HostCosts(**KNOWN)
    quiet, loud = fit_costs(made(known, noise=0.01)), fit_costs(made(known, noise=0.2))
    for name in ("write_s_per_gb", "checksum_s_per_gb", "fp8_s_per_gb", "begin_message_ms"):
        small, large = quiet.standard_errors[name], loud.standard_errors[name]
        assert small is not None and large is not None and 0 < small < large
    near = [
        abs(getattr(quiet.costs, name) - KNOWN[name]) < 4 * (quiet.standard_errors[name] or 0) for name in COSTS
    ]  # standard errors that are standard errors: nearly all costs lie within four of them
    assert sum(near) >= len(COSTS) - 1


def test_what_was_not_done_costs_nothing_and_has_no_error() -> None:
    known = HostCosts(**KNOWN)
    runs = [run for run in made(known) if "copy" in run.label]
    found = fit_costs(runs)
    assert found.costs.fp8_s_per_gb == 0 and found.standard_errors["fp8_s_per_gb"] is None
    assert found.costs.checksum_s_per_gb == pytest.approx(KNOWN["checksum_s_per_gb"], rel=1e-6)


def test_too_few_runs_are_refused() -> None:
    runs = made(HostCosts(**KNOWN))
    with pytest.raises(ValueError, match=r"1 runs are too few for .* costs: .*write_us"):
        fit_costs(runs[:1])
    with pytest.raises(ValueError, match="measure more shapes"):
        fit_costs([runs[0]] * 3)
    with pytest.raises(ValueError, match="0 runs are too few"):
        fit([])


def test_without_runs_held_out_there_is_no_error_to_show() -> None:
    found = fit_costs(made(HostCosts(**KNOWN)))
    assert found.held_out == () and np.isnan(found.median_error) and np.isnan(found.worst_error)


@example(6, 201)  # a column that is taken up and has to go again
@given(st.integers(1, 6), st.integers(0, 1 << 30))
def test_least_squares_are_never_negative_and_never_improvable(columns: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    matrix = draw.normal(size=(columns + 4, columns)) + 0.5  # columns that can stand in for each other
    measured = matrix @ draw.normal(size=columns)
    values, errors = nonnegative_least_squares(matrix, measured)
    assert (values >= 0).all() and np.array_equal(np.isnan(errors), values == 0)
    slope = matrix.T @ (measured - matrix @ values)  # Karush, Kuhn and Tucker
    assert (slope <= 1e-6).all() and np.allclose(slope[values > 0], 0, atol=1e-6)


@given(st.integers(1, 12), st.integers(1, 3), st.integers(0, 1 << 30))
def test_cores_are_shared_fairly(threads: int, machines: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    wanted, host = draw.random(threads), draw.integers(0, machines, threads)
    cores = draw.random(machines) * 3
    given_s = grant(wanted, host, cores)
    assert (given_s >= 0).all() and (given_s <= wanted + 1e-9).all()
    for machine in range(machines):
        mine = host == machine
        used = given_s[mine].sum()
        assert used <= cores[machine] + 1e-9
        assert used >= 0.999 * min(cores[machine], wanted[mine].sum()) - 1e-9  # nothing is left idle
        short = mine & (given_s < wanted - 1e-6)
        if short.any():  # who gets less than it wants gets no less than anybody else there
            assert given_s[short].min() >= given_s[mine].max() - 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("cores", [0.5, 1.0, 2.0, 100.0])
def test_fewer_cores_take_longer_and_never_less_than_the_work(cores: float) -> None:
    costs, run = HostCosts(**KNOWN), replace(shape(*SHAPES[0]), cores=cores)
    found = expect(run, costs)
    assert found >= run.labour.total_s(costs) / cores * 0.95
    assert found >= run.labour.longest_s(costs)
    assert found <= expect(replace(run, cores=cores / 2), costs)
    if cores == 1.0:  # one core does one thing at a time: hardly anything is lost
        assert found <= run.labour.total_s(costs) * 1.15


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="write_us must not be negative"):
        HostCosts(**(KNOWN | {"write_us": -1.0}))
    with pytest.raises(ValueError, match="a machine has cores"):
        Hosts(costs=HostCosts(**KNOWN), cores=0.0)
