"""A replica with the right name and another plan is refused with what differs, and versions of the others go on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from weight_fixture import SHAPE, Fixture, open_fixture, random_shard, run, small_plan

import asyncfabric as af
from asyncfabric.weights import Mesh, Move, Plan, Shard, alone, place, plan_weights
from asyncfabric.weights.agreement import Outline
from asyncfabric.weights.channel import AGAIN_S
from asyncfabric.weights.messages import (
    Failed,
    Fetched,
    Given,
    Offered,
    Ready,
    Refused,
    Standing,
    Stopped,
    Want,
    decode_message,
)
from asyncfabric.weights.receiver import copies as copies_module
from asyncfabric.weights.receiver import versions as versions_module
from asyncfabric.weights.receiver.copies import Copy
from asyncfabric.weights.receiver.refusal import MOST_S, Backoff, Refusal
from asyncfabric.weights.update import COORDINATOR, open_coordinator, open_replica

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")

OTHER = "other/0"


def plan_of(
    *,
    shape: tuple[int, int] = SHAPE,
    name: str = "down",
    dtype: str = "bfloat16",
    cut: int = 1,
    trainers: int = 2,
    receivers: int = 2,
    more: int = 0,
    chunk_bytes: int = 1 << 14,
) -> Plan:
    """Return a plan whose second tensor is as it is given."""
    trainer, replica = Mesh.of({"fsdp": trainers}), Mesh.of({"tp": receivers})

    def move(name: str, shape: tuple[int, int], dtype: str, cut: int) -> Move:
        held = place(shape, trainer, {"fsdp": Shard(0)})
        return Move(name, dtype, held, name, dtype, alone(place(shape, replica, {"tp": Shard(cut)})))

    moves = [move("up", SHAPE, "bfloat16", 0), move(name, shape, dtype, cut)]
    moves += [move(f"more {number}", SHAPE, "bfloat16", 0) for number in range(more)]
    return plan_weights(moves, trainers=trainers, receivers=receivers, replicas=(), chunk_bytes=chunk_bytes)


@pytest.mark.parametrize(
    ("other", "part", "text"),
    [
        (plan_of(shape=(256, 512)), 4, "'down', bfloat16 (256, 512) held by 2 trainers, [128, 512] by rank 0"),
        (plan_of(name="sideways"), 4, "'sideways', bfloat16 (256, 384)"),
        (plan_of(dtype="float32"), 4, "'down', float32 (256, 384)"),
        (plan_of(cut=0), 4, "'down', bfloat16 (256, 384)"),
        (plan_of(trainers=4), 0, "4 trainers"),
        (plan_of(receivers=4), 1, "4 receivers in each replica"),
        (plan_of(more=1), 5, "'more 0', bfloat16 (256, 384)"),
        (plan_of(chunk_bytes=1 << 13), 3, "'up', bfloat16 (256, 384)"),
        (plan_of(), 5, "no further tensor"),
    ],
)
def test_an_outline_names_the_first_part_that_differs(other: Plan, part: int, text: str) -> None:
    own, theirs = Outline(plan_of()), Outline(other)
    assert theirs.difference(own.hashes) == part
    assert theirs.text(part).startswith(text)
    if len(own) == len(theirs):
        assert own.difference(theirs.hashes) == part


def test_rests_double_up_to_a_bound() -> None:
    backoff = Backoff()
    rests = [backoff.next_s() for _ in range(10)]
    assert rests[:3] == [AGAIN_S, 2 * AGAIN_S, 4 * AGAIN_S]
    assert rests[-1] == MOST_S == max(rests)
    backoff.reset()
    assert backoff.next_s() == AGAIN_S


def test_a_new_session_forgets_what_differed_from_another_coordinator() -> None:
    async def body() -> None:
        reports: list[None] = []
        refusal = Refusal("a/0", plan_of(), lambda: reports.append(None))
        await refusal.take(Refused("m", "another plan", Outline(plan_of(trainers=4)).hashes))
        assert refusal.reason == "another plan" and refusal.differs is not None and refusal.differs.part == 0
        refusal.session_began()
        assert (refusal.reason, refusal.differs, len(reports)) == ("", None, 1)

    run(body)


def counted(fixture: Fixture) -> Counter[tuple[str, str, str]]:
    """Count the messages between the coordinator and the other replica."""
    deliver, found = fixture.post.deliver, Counter[tuple[str, str, str]]()

    def count(sender: str, to: str, data: bytes) -> None:
        if OTHER in (sender, to):
            found[sender, to, type(decode_message(data)).__name__] += 1
        deliver(sender, to, data)

    fixture.post.deliver = count  # type: ignore[method-assign]
    return found


def test_a_replica_with_another_plan_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    async def body() -> None:
        other = plan_of()
        async with open_fixture(small_plan(), random_shard, tmp_path / "log") as fixture:
            await fixture.bring(1)
            found, began = counted(fixture), anyio.current_time()
            post = fixture.post.open(OTHER)
            async with af.open_fabric() as fabric, open_replica(fabric, post, other, "other", 0) as replica:
                while "differ first" not in replica.refusal:
                    await anyio.lowlevel.checkpoint()
                reason = replica.refusal
                assert fixture.coordinator.refused == {OTHER: reason}
                assert other.digest in reason and fixture.plan.with_replicas(()).digest in reason
                assert "differ first in 'gate', bfloat16 (256, 384) held by 2 trainers" in reason
                assert "and 'up', bfloat16 (256, 384) held by 2 trainers, [128, 384] by rank 0; " in reason
                assert reason.endswith(f"at {OTHER}")
                for version in (2, 3):
                    fixture.change(version)
                    assert OTHER not in (await fixture.bring(version)).receivers
                assert OTHER not in fixture.coordinator.receivers and replica.step_boundary() == 0
                rests = (anyio.current_time() - began) / AGAIN_S
                assert found[OTHER, COORDINATOR, "Standing"] <= 3 + rests
                assert {name for _, _, name in found} == {"Standing", "Refused"}
                fixture.post.close(OTHER)
            await anyio.wait_all_tasks_blocked()
            assert fixture.coordinator.refused == {}

    run(body)


STRANGE = ("x", "trainer-7", "a/b", "/0", "a/", "a/\u0663", "a/00", "a/2", "a/+1", "a/" + "1" * 5000)


def test_a_participant_whose_name_is_no_receiver_s_is_refused_alone(tmp_path: Path) -> None:
    """Whatever it sends: the coordinator goes on, and so do the others."""

    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log") as fixture:
            await fixture.bring(1)
            strangers = {name: fixture.post.open(name) for name in STRANGE}
            right = fixture.plan.with_replicas(()).digest
            for stranger in strangers.values():
                for message in (
                    Offered(2),
                    Standing(0, 0, manifest=right),
                    Fetched(1),
                    Stopped(1),
                    Ready(2),
                    Failed(2, "x"),
                ):
                    await stranger.send(COORDINATOR, message)
            fixture.change(2)
            assert set((await fixture.bring(2)).receivers) == set(fixture.replicas)
            assert set(fixture.coordinator.refused) == set(STRANGE)
            for name, stranger in strangers.items():
                refused = [event for _, event in stranger.take_nowait() if isinstance(event, Refused)]
                assert [one.reason for one in refused] == [fixture.coordinator.refused[name]]
                assert ("receivers 0 to 1" if name == "a/2" else "replica/number") in refused[0].reason
                fixture.post.close(name)
            await anyio.wait_all_tasks_blocked()
            assert fixture.coordinator.refused == {}

    run(body)


def test_a_refused_replica_is_taken_by_a_coordinator_of_its_plan(tmp_path: Path) -> None:
    """Another coordinator takes the place of the one that refused it."""

    async def body() -> None:
        other = plan_of()
        async with open_fixture(small_plan(), random_shard, tmp_path / "log") as fixture:
            post = fixture.post.open(OTHER)
            async with af.open_fabric() as fabric, open_replica(fabric, post, other, "other", 0) as replica:
                while not replica.refusal:
                    await anyio.lowlevel.checkpoint()
                fixture.post.close(COORDINATOR)
                again = fixture.post.open(COORDINATOR)
                async with open_coordinator(again, other, tmp_path / "other log") as coordinator:
                    await coordinator.wait_receivers([OTHER])
                    assert set(coordinator.refused) == set(fixture.replicas)
                    fixture.post.close(COORDINATOR)
                fixture.post.close(OTHER)

    run(body)


def test_a_fetch_that_fails_is_tried_again_after_longer_and_longer_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator names a source again at once, however a fetch fails."""

    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log") as fixture:
            await fixture.bring(1)
            found, began = counted(fixture), anyio.current_time()

            async def give(fabric: af.Fabric, copy: Copy, want: Want) -> Given:
                if found[OTHER, "a/0", "Want"] + found[OTHER, "b/0", "Want"] < 4:
                    return Given(want.version, want.imm, b"", "by choice")
                return await copies_module.give(fabric, copy, want)

            monkeypatch.setattr(versions_module, "give", give)
            post = fixture.post.open(OTHER)
            async with af.open_fabric() as fabric, open_replica(fabric, post, fixture.plan, "other", 0) as replica:
                await replica.wait_version(1)
                assert found[COORDINATOR, OTHER, "CatchUp"] == 4
                assert anyio.current_time() - began >= (1 + 2 + 4) * AGAIN_S
                assert "by choice" in replica.failure
                fixture.post.close(OTHER)

    run(body)
