"""What an update does how often, against counts that fit in the head: they are those that real updates report."""

from __future__ import annotations

import pytest

from asyncfabric.sim import Assumptions, HostCosts, workload_of
from asyncfabric.sim.costs import COSTS
from asyncfabric.sim.labour import Thread, labour_of
from asyncfabric_services.bench.weights.workload import plan_of
from asyncfabric_services.plan.runs import sent_runs

MATRIX = 256 * 256


def counted(
    name: str, thread: Thread, replicas: int = 1, form: str = "copy", unit_bytes: int = 1 << 30, gathers: bool = False
) -> float:
    """Return how often 2 trainers to 2 receivers do something for 2 matrices: one cut in rows, one in columns."""
    plan = plan_of(2, 2, replicas, 2, 256, form)
    work = workload_of(plan, Assumptions(unit_bytes=unit_bytes, watermark_bytes=1 << 40))
    one = {cost: float(cost == name) for cost in COSTS}
    return float(labour_of(plan, work, sent_runs(plan, gathers)).seconds(thread, HostCosts(**one)).sum())


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_is_done_once_and_what_for_every_replica(replicas: int) -> None:
    both = 2 * MATRIX * 2  # bytes of two matrices of bfloat16
    assert counted("checksum_s_per_gb", "trainer work", replicas) == pytest.approx(both / 1e9)
    assert counted("gather_s_per_gb", "trainer work", replicas) == pytest.approx(both / 2 / 1e9)
    assert counted("write_s_per_gb", "trainer engine", replicas) == pytest.approx(both * replicas / 1e9)
    assert counted("checksum_s_per_gb", "receiver work", replicas) == pytest.approx(both * replicas / 1e9)
    assert counted("receive_s_per_gb", "receiver engine", replicas) == pytest.approx(both * replicas / 1e9)


def test_what_the_rail_gathers_is_neither_hashed_nor_put_in_order_by_trainers() -> None:
    both = 2 * MATRIX * 2
    assert counted("box_s_per_gb", "trainer engine", 2, gathers=True) == pytest.approx(2 * both / 1e9)
    assert counted("write_s_per_gb", "trainer engine", gathers=True) == 0
    assert counted("checksum_s_per_gb", "trainer work", gathers=True) == 0
    assert counted("gather_s_per_gb", "trainer work", gathers=True) == 0
    assert counted("box_s_per_gb", "trainer engine", form="cast", gathers=True) == 0
    assert counted("write_us", "trainer engine", gathers=True) == counted("write_us", "trainer engine")


def test_writes_are_those_that_senders_make() -> None:
    # Rows: one write of half a matrix each. Columns: put in order, one write of each trainer to both receivers.
    assert counted("write_us", "trainer engine") == pytest.approx((2 + 2 * 2) / 1e6)
    assert counted("write_us", "trainer engine", form="cast") == pytest.approx((2 + 2 * 2) / 1e6)


def test_units_and_messages() -> None:
    # One unit: each trainer reports to both receivers. A unit for each box: rows go to one receiver, columns to both.
    assert counted("unit_ms", "trainer loop") == pytest.approx(2e-3)
    assert counted("message_ms", "trainer loop") == pytest.approx(4e-3)
    assert counted("message_ms", "trainer loop", unit_bytes=1 << 14) == pytest.approx(6e-3)
    assert counted("report_ms", "receiver loop", unit_bytes=1 << 14) == pytest.approx(6e-3)
    assert counted("process_ms", "trainer loop") == counted("process_ms", "receiver loop") == pytest.approx(2e-3)
    assert counted("begin_message_ms", "coordinator begins", replicas=2) == pytest.approx((2 * 2 + 4 * 3) / 1e3)
    assert counted("end_message_ms", "coordinator", replicas=2) == pytest.approx((2 * 3 + 4 * 2) / 1e3)
    assert counted("update_ms", "coordinator", replicas=2) == pytest.approx(1e-3)


@pytest.mark.parametrize(("form", "name"), [("cast", "cast_s_per_gb"), ("fp8", "fp8_s_per_gb")])
def test_conversions_count_what_is_written(form: str, name: str) -> None:
    scales = 2 * 4 * 4 if form == "fp8" else 0  # two matrices of four blocks, a float32 each
    size = 2 * MATRIX * (1 if form == "fp8" else 2) + scales
    assert counted(name, "trainer work", form=form) == pytest.approx(size / 1e9)
    assert counted("gather_s_per_gb", "trainer work", form=form) == 0
