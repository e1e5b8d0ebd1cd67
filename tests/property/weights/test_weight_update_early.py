"""Where cores are idle, trainers fill units before receivers have opened their memory, with checksums as last time."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weight_fixture import open_fixture, run

from asyncfabric.weights import Plan, threads
from asyncfabric.weights.memory import host as host_device
from asyncfabric.weights.sender.filling import UnitFiller
from asyncfabric.weights.sender.pipeline import WeightSending
from asyncfabric_services.bench.weights.workload import plan_of, rows_of

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")

SIDE = 256


def plan() -> Plan:
    return plan_of(trainers=2, receivers=2, replicas=1, matrices=6, side=SIDE, form="copy", chunk_bytes=1 << 14)


def shard(rank: int, name: str) -> np.ndarray[Any, Any]:
    half = SIDE // 2
    return np.array(rows_of(int(name.split()[1]), SIDE, rank * half, (rank + 1) * half, 0, "copy"))


def seen_in(patch: pytest.MonkeyPatch, busy: int) -> list[str]:
    """Return a list of what the senders of a version do, in order, filled while it comes."""
    seen: list[str] = []
    fill, opened, begun = UnitFiller.fill_here, WeightSending.open, WeightSending.run

    def noted(name: str, method: Any) -> Any:
        def call(self: Any, *arguments: Any) -> Any:
            seen.append(f"{name} {self.kind}" if name == "run" else name)
            return method(self, *arguments)

        return call

    patch.setattr(threads, "threads", lambda: busy)
    patch.setattr(host_device.HostDevice, "unit_bytes", 1 << 15)
    for name, kind, method in (
        ("fill", UnitFiller, fill),
        ("open", WeightSending, opened),
        ("run", WeightSending, begun),
    ):
        patch.setattr(kind, {"fill": "fill_here"}.get(name, name), noted(name, method))
    return seen


@pytest.mark.parametrize("busy", [2, 8])
def test_units_are_filled_before_receivers_open_where_threads_are_idle(
    monkeypatch: pytest.MonkeyPatch, busy: int
) -> None:
    seen = seen_in(monkeypatch, busy)

    async def body() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with open_fixture(plan(), shard, Path(folder) / "log") as fixture:
                for version in (1, 2, 3):
                    seen.clear()
                    await fixture.bring(version)
                    early = seen.index("run xxh3") < seen.index("open")
                    assert early == (version > 1 and busy > 2), seen
                    assert seen.count("open") == seen.count("run xxh3") == 2
                    fixture.change(version)

    run(body)


def test_units_that_were_filled_with_other_checksums_are_filled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver on a GPU that joins wants checksums that it can do."""
    seen = seen_in(monkeypatch, 8)

    async def body() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with open_fixture(plan(), shard, Path(folder) / "log") as fixture:
                await fixture.bring(1)
                fixture.change(1)
                monkeypatch.setattr(host_device.HostDevice, "checksum", "words")
                seen.clear()
                await fixture.bring(2)
                assert seen.count("run xxh3") == seen.count("run words") == seen.count("open") == 2, seen
                fixture.change(2)
                seen.clear()
                await fixture.bring(3)
                assert seen.count("run words") == 2 and "run xxh3" not in seen

    run(body)
