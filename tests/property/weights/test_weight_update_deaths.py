"""Deaths in the middle of an update: the others end with one whole version, and who waited learns who died."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from weight_fixture import open_fixture, random_shard, run, small_plan

import asyncfabric as af
from asyncfabric.weights import Relay
from asyncfabric.weights.messages import Opened, WeightMessage, Written

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("relay", "name"), [(None, "b/1"), (Relay(2, 1), "a/1")])
def test_a_receiver_dies_while_it_is_written_to(tmp_path: Path, relay: Relay | None, name: str) -> None:
    """Without forwarding the update goes on without it; one that forwards, as those of `a` do, takes it along."""

    async def body() -> None:
        async with open_fixture(small_plan(relay=relay), random_shard, tmp_path / "log") as fixture:
            before = await fixture.begin()
            fixture.kill_at(name, Written)
            if relay is None:
                report = await fixture.update(2)
                assert set(report.receivers) > set(fixture.replicas)
                await fixture.flip(2)
                fixture.check(2)
            else:
                with pytest.raises(af.BrokenError, match=f"sender {name}: killed"):
                    await fixture.update(2)
                assert {replica.step_boundary() for replica in fixture.replicas.values()} == {1}
                fixture.check(1, before)
            await fixture.bring(3)  # a replica is not whole any more: nobody forwards

    run(body)


def test_a_trainer_dies_while_it_writes(tmp_path: Path) -> None:
    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log") as fixture:
            before = await fixture.begin()
            victim, dead = fixture.publishers[1], anyio.Event()

            send = victim._post

            async def die(to: str, message: WeightMessage) -> None:
                if not isinstance(message, Written):
                    await send(to, message)
                elif not dead.is_set():
                    dead.set()
                    fixture.post.close("trainer-1", "killed")

            victim._post = die  # type: ignore[method-assign]
            with pytest.raises(af.BrokenError, match="sender trainer-1: killed"):
                await fixture.update(2)
            assert {replica.step_boundary() for replica in fixture.replicas.values()} == {1}
            fixture.check(1, before)
            with pytest.raises(ValueError, match="version must be greater than 2, got 2"):
                await fixture.coordinator.update(2)

    run(body)


def test_a_receiver_that_refuses_writes_fails_the_update_by_name(tmp_path: Path) -> None:
    """Its keys are dead and it is alive: nobody waits for it for ever."""

    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log", grace_s=0.1) as fixture:
            await fixture.update(1)
            await fixture.flip(1)
            before = fixture.expected()
            first = fixture.replicas["a/0"]._versions.copies[0].doors[0].region
            keys = first.key("write")
            await first.revoke()
            for publisher in fixture.publishers:
                take = publisher._take_message

                def dead(sender: str, event: Any, take: Any = take) -> None:
                    if isinstance(event, Opened) and sender == "a/0":
                        event = Opened(event.version, [(0, keys.to_bytes())], event.imm)
                    take(sender, event)

                publisher._take_message = dead  # type: ignore[method-assign]
            with pytest.raises(
                af.BrokenError, match=r"version 2 was not committed: a/0: trainer-\d cannot write to it"
            ):
                await fixture.update(2)
            assert {replica.step_boundary() for replica in fixture.replicas.values()} == {1}
            fixture.check(1, before)

    run(body)
