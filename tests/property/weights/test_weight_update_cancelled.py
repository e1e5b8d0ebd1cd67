"""INV-2 of a cancelled `publish`, on rails that hold each write for a while: its shards may change once it has ended.

Over rails that copy at once nothing is ever in flight when a cancellation comes. Here writes are, and replicas do not
learn that the version was aborted, so nothing but the publisher keeps what is held from being read late and landing.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from weight_fixture import Fixture, open_fixture, random_shard, run, small_plan

import asyncfabric as af
from asyncfabric.weights.memory import host as host_device
from asyncfabric.weights.memory import rows
from asyncfabric.weights.messages import Abort

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")
pytestmark = pytest.mark.slow

HELD_S = 0.3
POISON = 0xA7
"""Twice, a bfloat16 that no test draws; the bytes of each weight are written as they are."""


def in_flight(fixture: Fixture) -> int:
    return sum(peer.ops_in_flight for peer in fixture.fabrics["trainer-0"].statistics().peers)


def poisoned(fixture: Fixture) -> int:
    """Return how many weights of any copy of any replica are poison."""
    found = 0
    for replica in fixture.replicas.values():
        for copy in replica.copies:
            found += int((copy["down"].view("<u2") == POISON * 0x0101).sum())
    return found


def deafen(fixture: Fixture) -> None:
    """Let no replica learn of an abort: its memory stays open."""
    for replica in fixture.replicas.values():
        take = replica._versions._take_message

        async def deaf(sender: str, event: Any, take: Any = take) -> None:
            if not isinstance(event, Abort):
                await take(sender, event)

        replica._versions._take_message = deaf  # type: ignore[method-assign]


def sources(fixture: Fixture) -> list[Any]:
    """Return the memory that trainer 0 writes from: its shards, and what is staged."""
    made = fixture.publishers[0]._preparation._made
    assert made is not None and made[3].staging is not None
    staged = np.frombuffer(made[3].staging.region.memory, np.uint8)
    return [staged, *(array.reshape(-1).view(np.uint8) for array in fixture.shards[0].values())]


async def until_all_that_was_held_has_left(fixture: Fixture) -> None:
    """Write once more to each replica: a write that is posted later is held longer."""
    source = await fixture.fabrics["trainer-0"].allocate(64)
    for name in fixture.replicas:
        target = await fixture.fabrics[name].allocate(64)
        await fixture.fabrics["trainer-0"].write(source, target.key("write"), 0)
        await target.release()
    await source.release()


@pytest.mark.parametrize("rail", ["local", "tcp"])
@pytest.mark.parametrize("where", ["shards", "staging"])
def test_what_is_posted_is_not_read_after_a_cancelled_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rail: str, where: str
) -> None:
    """From the shards themselves, or from the staging memory, which the next version fills again."""
    monkeypatch.setattr(host_device.HostDevice, "unit_bytes", 32 << 10)
    if where == "shards":
        monkeypatch.setattr(rows, "DIRECT_RUN_BYTES", 1)

    held = f"fault+{rail}?delay_us={HELD_S * 1e6:.0f}"

    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log", rail=held) as fixture:
            before = await fixture.begin()
            deafen(fixture)

            async def other() -> None:
                with pytest.raises(af.BrokenError):
                    await fixture.publishers[1].publish(2)

            async def cut() -> None:
                with anyio.CancelScope() as scope:
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(fixture.publishers[0].publish, 2)
                        seen, late = {0}, math.inf
                        # Units that were posted at three moments leave at three; a busy machine may post them at fewer.
                        while len(seen) < 4 and anyio.current_time() < late:
                            await anyio.lowlevel.checkpoint()
                            seen.add(in_flight(fixture))
                            if len(seen) == 2:
                                late = min(late, anyio.current_time() + HELD_S / 3)
                        scope.cancel()
                assert in_flight(fixture) == 0
                for array in sources(fixture):
                    array[:] = POISON

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(other)
                tasks.start_soon(cut)
                with pytest.raises(af.BrokenError, match="trainer-0: its publish was cancelled"):
                    await fixture.coordinator.update(2)
            await until_all_that_was_held_has_left(fixture)
            assert poisoned(fixture) == 0
            assert {replica.step_boundary() for replica in fixture.replicas.values()} == {1}
            fixture.check(1, before)

    run(body)
