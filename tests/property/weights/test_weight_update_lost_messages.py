"""Words that are sent and never received, because who sends them dies or a session breaks: nobody waits for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from weight_fixture import Fixture, open_fixture, random_shard, run, small_plan

import asyncfabric as af
from asyncfabric.weights import Relay
from asyncfabric.weights.channel import AGAIN_S
from asyncfabric.weights.messages import Maxima, Opened, Want, WeightMessage, Write, decode_message
from asyncfabric.weights.update import COORDINATOR, open_replica
from asyncfabric_services.bench.weights.workload import plan_of, rows_at, rows_of

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")

PATIENCE_S = 30.0
SIDE = 256


def unreceived(
    fixture: Fixture, which: Callable[[str, str, WeightMessage], bool], then: Callable[[str, str], None]
) -> None:
    """Lose the first message that `which` accepts, given (from, to, message), and do something."""
    deliver = fixture.post.deliver
    lost: list[tuple[str, str]] = []

    def pass_on(sender: str, to: str, data: bytes) -> None:
        if not lost and which(sender, to, decode_message(data)):
            lost.append((sender, to))
            then(sender, to)
        else:
            deliver(sender, to, data)

    fixture.post.deliver = pass_on  # type: ignore[method-assign]


def renew(fixture: Fixture) -> Callable[[str, str], None]:
    """Return what breaks the session of two participants, who find each other again at once."""
    return fixture.post.renew


async def broken(fixture: Fixture, version: int, match: str) -> None:
    with pytest.raises(af.BrokenError, match=match), anyio.fail_after(PATIENCE_S):
        await fixture.update(version)


@pytest.mark.parametrize("codings", [(), ("exponent",)])
def test_a_receiver_dies_before_a_trainer_has_its_key(tmp_path: Path, codings: tuple[str, ...]) -> None:
    """The coordinator had learned that it was ready, and let trainers write to it: the others get the version."""

    async def body() -> None:
        async with open_fixture(
            small_plan(), random_shard, tmp_path / "log", codings=codings, coding="always"
        ) as fixture:
            await fixture.begin()
            unreceived(
                fixture,
                lambda who, to, stated: isinstance(stated, Opened) and (who, to) == ("b/0", "trainer-1"),
                lambda *_: None,
            )
            deliver = fixture.post.deliver

            def die(sender: str, to: str, data: bytes) -> None:
                if isinstance(decode_message(data), Write) and "b/0" in fixture.replicas:
                    del fixture.replicas["b/0"]
                    fixture.post.close("b/0", "killed")
                deliver(sender, to, data)

            fixture.post.deliver = die  # type: ignore[method-assign]
            with anyio.fail_after(PATIENCE_S):
                report = await fixture.update(2)
            assert "b/0" in report.receivers
            await fixture.flip(2)
            fixture.check(2)
            await fixture.bring(3)

    run(body)


def test_a_receiver_that_came_back_before_the_update_began_takes_part(tmp_path: Path) -> None:
    """A trainer that had offered the version already learns that it is gone, and then the roster."""

    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log") as fixture:
            await fixture.begin()
            with anyio.fail_after(PATIENCE_S):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(fixture.publishers[1].publish, 2)
                    await anyio.wait_all_tasks_blocked()
                    fixture.post.renew(COORDINATOR, "b/0")
                    await anyio.wait_all_tasks_blocked()
                    await fixture.coordinator.wait_receivers(fixture.replicas)
                    tasks.start_soon(fixture.publishers[0].publish, 2)
                    await fixture.coordinator.update(2)
            await fixture.flip(2)
            fixture.check(2)

    run(body)


def test_a_link_breaks_that_carried_the_key_of_a_receiver(tmp_path: Path) -> None:
    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log", grace_s=0.1) as fixture:
            await fixture.begin()
            unreceived(
                fixture, lambda who, to, stated: isinstance(stated, Opened) and to == "trainer-1", renew(fixture)
            )
            await broken(fixture, 2, "trainer-1 cannot write to it: its session broke")
            await fixture.bring(3)

    run(body)


def test_a_link_breaks_that_carried_the_key_to_one_who_forwards(tmp_path: Path) -> None:
    async def body() -> None:
        async with open_fixture(small_plan(relay=Relay(2, 1)), random_shard, tmp_path / "log", grace_s=0.1) as fixture:
            await fixture.begin()
            unreceived(fixture, lambda who, to, stated: isinstance(stated, Opened) and "/" in to, renew(fixture))
            await broken(fixture, 2, "/. cannot write to it: its session broke")
            await fixture.bring(3)

    run(body)


def test_a_link_breaks_that_carried_the_maxima_of_a_trainer(tmp_path: Path) -> None:
    plan = plan_of(trainers=3, receivers=2, replicas=1, matrices=2, side=SIDE, form="fp8")

    def shard(rank: int, name: str) -> Any:
        return rows_of(int(name.split()[1]), SIDE, *rows_at(rank, 3, SIDE), 0, "fp8")

    async def body() -> None:
        async with open_fixture(plan, shard, tmp_path / "log") as fixture:
            await fixture.begin()
            unreceived(fixture, lambda who, to, stated: isinstance(stated, Maxima), renew(fixture))
            await broken(fixture, 2, r"sender trainer-\d: the session with trainer-\d broke")
            await fixture.bring(3)

    run(body)


@pytest.mark.parametrize("kind", [Opened, Maxima])
@pytest.mark.parametrize("relay", [None, Relay(2, 1)])
def test_participants_that_have_no_session_yet_are_notified_once_they_have(
    tmp_path: Path, kind: type, relay: Relay | None
) -> None:
    """Everybody has found the coordinator, which lets an update begin, and finds the others a while later."""
    plan = plan_of(trainers=3, receivers=2, replicas=2, matrices=2, side=SIDE, form="fp8")
    if relay is not None:
        plan = small_plan(relay=relay)

    def shard(rank: int, name: str) -> Any:
        if relay is not None:
            return random_shard(rank, name)
        return rows_of(int(name.split()[1]), SIDE, *rows_at(rank, 3, SIDE), 0, "fp8")

    async def body() -> None:
        async with open_fixture(plan, shard, tmp_path / "log") as fixture:
            deliver, refused = fixture.post.deliver, Counter[tuple[str, str]]()

            def meet_late(sender: str, to: str, data: bytes) -> None:
                if isinstance(decode_message(data), kind) and refused[sender, to] < 3:
                    refused[sender, to] += 1
                    raise af.PeerError(f"{to} is not there yet")
                deliver(sender, to, data)

            fixture.post.deliver = meet_late  # type: ignore[method-assign]
            with anyio.fail_after(PATIENCE_S):
                await fixture.update(1)
            await fixture.flip(1)
            fixture.check(1)
            assert bool(refused) == (kind is Opened or relay is None)  # small shards cut no block

    run(body)


def test_who_finds_no_session_with_the_source_asks_again_after_a_rest(tmp_path: Path) -> None:
    """The coordinator names a source at once, again and again: nobody may run in circles as fast as words go."""

    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log") as fixture:
            await fixture.update(1)
            await fixture.flip(1)
            deliver, asked = fixture.post.deliver, 0
            until = anyio.current_time() + 0.5

            def meet_late(sender: str, to: str, data: bytes) -> None:
                nonlocal asked
                if isinstance(decode_message(data), Want):
                    asked += 1
                    if anyio.current_time() < until:
                        raise af.PeerError(f"{to} is not there yet")
                deliver(sender, to, data)

            fixture.post.deliver = meet_late  # type: ignore[method-assign]
            plan, post = fixture.plan, fixture.post.open("late/0")
            async with af.open_fabric() as fabric, open_replica(fabric, post, plan, "late", 0) as late:
                with anyio.fail_after(PATIENCE_S):
                    await late.wait_version(1)
                assert 2 <= asked <= 0.5 / AGAIN_S + 2
                fixture.post.close("late/0")

    run(body)


def test_a_link_that_carries_nothing_of_the_version_may_break(tmp_path: Path) -> None:
    """Trainers whose shards cut no block have nothing to send each other."""

    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log") as fixture:
            await fixture.begin()
            unreceived(fixture, lambda who, to, stated: False, renew(fixture))
            deliver = fixture.post.deliver

            def pass_on(sender: str, to: str, data: bytes) -> None:
                deliver(sender, to, data)
                if isinstance(decode_message(data), Write) and to == "trainer-1":
                    fixture.post.renew("trainer-0", "trainer-1")

            fixture.post.deliver = pass_on  # type: ignore[method-assign]
            with anyio.fail_after(PATIENCE_S):
                await fixture.update(2)
            await fixture.flip(2)
            fixture.check(2)

    run(body)
