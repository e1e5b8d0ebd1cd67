"""Ring 1: the core that a fabric's worker is pinned to: the one that was named, or a clear refusal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import asyncfabric as af

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")

pytestmark = pytest.mark.anyio


def worker_cores() -> list[set[int]]:
    """Return the cores of each worker thread of this process."""
    tasks = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text().strip() == "af-worker"]
    return [os.sched_getaffinity(int(task.name)) for task in tasks]


async def test_the_worker_runs_on_the_core_that_was_named() -> None:
    core = max(os.sched_getaffinity(0))
    async with af.open_fabric(af.FabricConfig(worker_cpu=core)):
        assert worker_cores() == [{core}]


@pytest.mark.parametrize("core", [1000, 5000])
async def test_a_core_that_is_not_there_is_refused_and_leaves_no_thread(core: int) -> None:
    with pytest.raises(ValueError, match=f"worker_cpu {core} is no core that this process may use"):
        async with af.open_fabric(af.FabricConfig(worker_cpu=core)):
            pass
    assert worker_cores() == []
