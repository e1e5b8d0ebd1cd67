"""Updates among GPUs of random shards, fusions, casts and blocks, against the reference in numpy; needs hypothesis."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

pytest.importorskip("hypothesis", reason="RANDOM UPDATES AMONG GPUS WERE NOT TESTED: hypothesis is not installed")
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from weight_cases import Case, cases
from weight_fixture import run
from weight_gpus import WHERE, gpu_fixture

from asyncfabric.weights import Plan, Relay, plan_weights


@pytest.mark.parametrize("where", WHERE)
@settings(max_examples=6, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(
    cases(),
    cases(quantised=True),
    st.builds(Relay, st.integers(0, 3), st.integers(0, 2)),
    st.sampled_from([100, 1 << 14, 1 << 20]),
)
def test_updates_equal_the_reference(
    far: int, where: str, plain: Case, quantised: Case, relay: Relay, chunk_bytes: int
) -> None:
    for case in (plain, quantised):
        names = [f"replica {number}" for number in range(case.replicas)]
        plan = plan_weights(
            case.moves,
            trainers=case.trainers,
            receivers=case.receivers,
            replicas=names,
            relay=relay,
            chunk_bytes=max(chunk_bytes, 1 << 12) if case is quantised else chunk_bytes,
        )

        async def body(plan: Plan = plan, case: Case = case) -> None:
            with tempfile.TemporaryDirectory() as folder:
                async with gpu_fixture(plan, case.shard, Path(folder) / "log", far, where) as (fixture, refresh):
                    for version in (1, 2):
                        await fixture.bring(version)
                        fixture.change(version)
                        refresh()

        run(body)
