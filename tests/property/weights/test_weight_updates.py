"""Updates over real fabrics: what every receiver holds equals, byte for byte, what the reference executor writes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from weight_cases import Case, cases
from weight_fixture import open_fixture, run

from asyncfabric.weights import Relay, plan_weights, threads
from asyncfabric.weights.memory import host as host_device
from asyncfabric.weights.memory import rows

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")

RELAYS = st.builds(Relay, st.integers(0, 3), st.integers(0, 2))


def updated(case: Case, relay: Relay, chunk_bytes: int, rail: str) -> None:
    names = [f"replica {number}" for number in range(case.replicas)]
    plan = plan_weights(
        case.moves,
        trainers=case.trainers,
        receivers=case.receivers,
        replicas=names,
        relay=relay,
        chunk_bytes=chunk_bytes,
    )

    async def body() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with open_fixture(plan, case.shard, Path(folder) / "log", rail=rail) as fixture:
                for version in (1, 2):
                    await fixture.bring(version)
                    fixture.change(version)

    run(body)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, phases=[Phase.generate])
@given(cases(), RELAYS, st.integers(1, 200), st.sampled_from([1, 256]), st.sampled_from([2, 8]))
def test_updates_equal_the_reference(case: Case, relay: Relay, chunk_bytes: int, shortest: int, busy: int) -> None:
    """Also in the shortest runs of what lies in the shard, and with small units that are filled and checked at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "DIRECT_RUN_BYTES", shortest)
        patch.setattr(threads, "threads", lambda: busy)
        patch.setattr(host_device.HostDevice, "unit_bytes", 64)
        updated(case, relay, chunk_bytes, "local")


@pytest.mark.slow
@settings(max_examples=8, deadline=None, phases=[Phase.generate])
@given(cases(quantised=True), RELAYS, st.sampled_from([1 << 10, 1 << 14, 1 << 20]))
def test_quantised_updates_equal_the_reference(case: Case, relay: Relay, chunk_bytes: int) -> None:
    updated(case, relay, chunk_bytes, "local")


@pytest.mark.slow
@settings(max_examples=3, deadline=None, phases=[Phase.generate])
@given(cases(quantised=True), RELAYS)
def test_updates_over_tcp_equal_the_reference(case: Case, relay: Relay) -> None:
    updated(case, relay, 1 << 14, "tcp")
