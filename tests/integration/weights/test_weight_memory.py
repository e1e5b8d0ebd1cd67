"""What an update costs a trainer beyond its shards, as the kernel counts it, and what it costs when it is too little.

Over tcp, since over shared memory a process has its peers' memory mapped, and the kernel counts that too.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import pytest
from availability import need

from asyncfabric.weights.update import COORDINATOR
from asyncfabric_services.bench.pair import Process
from asyncfabric_services.exits import CheckFailed

MIB = 1 << 20
PATIENCE_S = 120.0
SIDE = 1024
MODEL: dict[str, Any] = {"trainers": 1, "receivers": 1, "replicas": 1, "matrices": 40, "side": SIDE, "form": "cast"}


def joined(stack: ExitStack, scratch_bytes: int) -> tuple[Process, Process, Process]:
    names = (COORDINATOR, "trainer-0", "replica 0/0")
    everyone = {name: stack.enter_context(Process("weights", name, time.monotonic() + PATIENCE_S)) for name in names}
    config = {"rails": ["tcp"], "peer_deadline_host": 60.0, "peer_deadline_network": 60.0}
    addresses = {name: process.call("open", config=config)["address"] for name, process in everyone.items()}
    for name, process in everyone.items():
        process.start("join", name=name, addresses=addresses, model=MODEL, scratch_bytes=scratch_bytes)
    for process in everyone.values():
        process.finish()
    coordinator, trainer, replica = everyone.values()
    return coordinator, trainer, replica


@pytest.mark.slow
def test_memory_beyond_the_shards_stays_under_the_watermark() -> None:
    """160 MiB are cast to 80 MiB, which do not fit under the bound at once."""
    need("tcp")
    scratch = 64 * MIB
    with ExitStack() as stack:
        coordinator, trainer, replica = joined(stack, scratch)
        before = trainer.call("forget_peak")
        for version in (1, 2):
            trainer.start("publish", version=version)
            coordinator.call("update", version=version)
            part = trainer.finish()
            assert replica.call("flip", version=version) == version
        extra = trainer.call("peak") - before
        assert replica.call("check", seed=0) == ""
        written = MODEL["matrices"] * SIDE * SIDE * 2
        assert part["stages"]["bytes"] == written > 1.2 * scratch
        assert 0 < part["staged_bytes"] < scratch
        assert extra < scratch, f"{extra / MIB:.1f} MiB beyond the shards, the bound is {scratch / MIB:.0f}"


@pytest.mark.slow
def test_too_little_scratch_is_reported_with_what_is_needed() -> None:
    need("tcp")
    with ExitStack() as stack:
        coordinator, trainer, _ = joined(stack, 8 * MIB)
        trainer.start("publish", version=1)
        with pytest.raises(CheckFailed, match="scratch_bytes is 8388608; the largest piece stages"):
            coordinator.call("update", version=1)
        with pytest.raises(CheckFailed, match="give at least"):
            trainer.finish()
