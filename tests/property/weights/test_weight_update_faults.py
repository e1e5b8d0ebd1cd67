"""Updates in which something goes wrong: every survivor serves one whole decided version, and the error states why."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest
from weight_fixture import open_fixture, random_shard, run, small_plan

import asyncfabric as af
from asyncfabric.weights.coordinator.decision_log import DecisionLog
from asyncfabric.weights.messages import Opened
from asyncfabric.weights.receiver.intake import Intake
from asyncfabric.weights.update import COORDINATOR, WeightPublisher, open_coordinator, open_replica

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")
pytestmark = pytest.mark.slow


async def nothing_right(intake: Any, rows: list[int], sums: list[int], kind: Any) -> list[bool]:
    return [False] * len(rows)


def test_a_flipped_byte_is_found_before_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever byte of whatever receiver changes after it was written, the version is not decided."""

    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log") as fixture:
            before = await fixture.begin()
            victim = fixture.replicas["b/1"]
            right = Intake._right

            async def flipped(
                self: Any, rows: list[int], sums: list[int], kind: Any, reported: Any = None
            ) -> list[bool]:
                if self.copy in victim._versions.copies:
                    place = self.places.places(rows[0])[0]
                    self.copy.memory[place] |= 0xFF
                    self.copy.memory[place] ^= 0x10
                return await right(self, rows, sums, kind, reported)

            monkeypatch.setattr(Intake, "_right", flipped)
            with pytest.raises(af.BrokenError, match=r"version 2 was not committed: b/1: .*wrong bytes.*trainer-"):
                await fixture.update(2)
            monkeypatch.undo()
            assert fixture.coordinator.committed == 1
            for replica in fixture.replicas.values():
                assert replica.step_boundary() == 1
            fixture.check(1, before)
            await fixture.bring(3)

    run(body)


def test_publishing_from_another_thread_is_refused_by_name(tmp_path: Path) -> None:
    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log") as fixture:

            async def publish() -> None:
                await fixture.publishers[0].publish(1)

            with pytest.raises(RuntimeError, match=r"the event loop and the thread that opened it.*trio\.from_thread"):
                await anyio.to_thread.run_sync(lambda: anyio.run(publish, backend="trio"))
            await fixture.bring(1)

    run(body)


def test_a_full_disk_under_the_log_leaves_the_old_version_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log") as fixture:
            before = await fixture.begin()
            pwrite, calls = os.pwrite, []

            def full(file: int, data: bytes, offset: int) -> int:
                calls.append(data)
                if b"commit" in data:
                    raise OSError(28, "No space left on device")
                return pwrite(file, data, offset)

            monkeypatch.setattr(os, "pwrite", full)
            with pytest.raises(af.BrokenError, match=r"could not take commit of version 2.*No space left"):
                await fixture.update(2)
            monkeypatch.undo()
            assert len(calls) == 2
            for replica in fixture.replicas.values():
                assert replica.step_boundary() == 1
            fixture.check(1, before)
            await fixture.bring(3)

    run(body)


def test_keys_of_a_version_are_dead_when_it_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """WC-4: committed or aborted, late writes under its keys are refused and change nothing."""

    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log") as fixture:
            keys: list[af.RegionKey] = []
            take = fixture.publishers[0]._take_message

            def listening(sender: str, event: Any) -> None:
                if isinstance(event, Opened) and sender == "a/0":
                    keys.append(af.RegionKey.from_bytes(event.keys[0][1]))
                take(sender, event)

            monkeypatch.setattr(fixture.publishers[0], "_take_message", listening)
            await fixture.update(1)
            await fixture.flip(1)
            with monkeypatch.context() as patch:
                patch.setattr(Intake, "_right", nothing_right)
                with pytest.raises(af.BrokenError, match="wrong bytes"):
                    await fixture.update(2)
            await fixture.update(3)
            await fixture.flip(3)
            fabric = fixture.fabrics["trainer-0"]
            poison = await fabric.allocate(4096)
            poison.memory[:] = b"\x5a" * 4096
            assert len(keys) == 3 == len({key.generation for key in keys}) or len({key.region_id for key in keys}) > 1
            for key in keys:
                with pytest.raises((af.StaleKeyError, af.TransferError)):
                    await fabric.write(poison, key, 0)
            await poison.release()
            fixture.check(3)

    run(body)


@pytest.mark.parametrize("rail", ["local", "tcp"])
def test_in_place_and_shadow_side_by_side(tmp_path: Path, rail: str) -> None:
    async def body() -> None:
        plan = small_plan()
        async with open_fixture(
            plan, random_shard, tmp_path / "log", rail=rail, shadow=lambda name: name.startswith("a")
        ) as fixture:
            for version in (1, 2, 3):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(fixture.update, version)
                    if version > 1:  # the engine of "b" has to stop at a boundary before it is overwritten
                        for name in ("b/0", "b/1"):
                            await fixture.replicas[name].wait_changed()
                            assert fixture.replicas[name].current_version() == version - 1
                            assert fixture.replicas[name].step_boundary() == 0
                            assert fixture.replicas[name].tensors() == {}
                await fixture.flip(version)
                fixture.check(version)
                fixture.change(version)

    run(body)


@pytest.mark.parametrize("rail", ["local", "tcp"])
def test_a_late_joiner_fetches_and_takes_part_in_the_next_update(tmp_path: Path, rail: str) -> None:
    async def body() -> None:
        plan = small_plan()
        async with open_fixture(plan, random_shard, tmp_path / "log", rail=rail) as fixture:
            await fixture.update(1)
            await fixture.flip(1)
            config = af.FabricConfig(rails=(rail,))
            async with (
                af.open_fabric(config) as one,
                af.open_fabric(config) as other,
                open_replica(one, fixture.post.open("late/0"), plan, "late", 0) as first,
                open_replica(other, fixture.post.open("late/1"), plan, "late", 1) as second,
            ):
                late = [first, second]
                for replica in late:
                    await replica.wait_version(1)
                    assert replica.step_boundary() == 1
                    tensors = fixture.replicas[f"a/{replica.receiver}"].tensors()
                    assert all(np.array_equal(mine, tensors[name]) for name, mine in replica.tensors().items())
                await fixture.coordinator.wait_held(["late/0", "late/1"], 1)
                fixture.change(1)
                report = await fixture.update(2)
                assert report.receivers == ("a/0", "a/1", "b/0", "b/1", "late/0", "late/1")
                await fixture.flip(2)
                fixture.check(2)
                for replica in late:
                    await replica.wait_version(2)
                    assert replica.step_boundary() == 2
                    tensors = fixture.replicas[f"b/{replica.receiver}"].tensors()
                    assert all(np.array_equal(mine, tensors[name]) for name, mine in replica.tensors().items())
                fixture.post.close("late/0")
                fixture.post.close("late/1")
            fixture.change(2)
            await fixture.bring(3)

    run(body)


def test_an_update_that_nobody_was_there_for_burns_its_number_and_the_next_one_works(tmp_path: Path) -> None:
    async def body() -> None:
        plan = small_plan(names=())
        async with open_fixture(plan, random_shard, tmp_path / "log") as fixture:
            for _ in range(2):
                with pytest.raises(af.BrokenError, match="not there: a receiver"):
                    await fixture.update(fixture.coordinator.begun + 1)
            async with (
                af.open_fabric(af.FabricConfig(rails=("local",))) as one,
                af.open_fabric(af.FabricConfig(rails=("local",))) as other,
                open_replica(one, fixture.post.open("a/0"), plan, "a", 0) as first,
                open_replica(other, fixture.post.open("a/1"), plan, "a", 1) as second,
            ):
                await fixture.coordinator.wait_receivers(["a/0", "a/1"])
                version = fixture.coordinator.begun + 1
                await fixture.update(version)
                for replica in (first, second):
                    await replica.wait_version(version)
                fixture.post.close("a/0")
                fixture.post.close("a/1")

    run(body)


def test_the_coordinator_restarts_between_verified_and_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """WC-2: what is on the disk is reported after the restart, what is not is an abort; both times to everybody."""

    async def body() -> None:
        plan = small_plan()
        async with open_fixture(plan, random_shard, tmp_path / "log") as fixture:
            await fixture.update(1)
            await fixture.flip(1)
            fixture.post.close(COORDINATOR)
            for version, decided in ((2, False), (3, True)):
                before = fixture.expected()
                fixture.change(1)
                log = tmp_path / f"log {version}"
                log.write_bytes((tmp_path / "log").read_bytes())
                commit = DecisionLog.commit

                def dying(self: DecisionLog, version: int, decided: bool = decided, commit: Any = commit) -> None:
                    if decided:
                        commit(self, version)
                    raise RuntimeError("killed here")

                outcomes: list[str] = []

                async def publish(
                    publisher: WeightPublisher, version: int = version, outcomes: list[str] = outcomes
                ) -> None:
                    try:
                        await publisher.publish(version)
                    except af.BrokenError as error:
                        outcomes.append(str(error))

                with monkeypatch.context() as patch:
                    patch.setattr(DecisionLog, "commit", dying)
                    async with anyio.create_task_group() as tasks:
                        try:
                            async with open_coordinator(fixture.post.open(COORDINATOR), plan, log) as doomed:
                                await doomed.wait_receivers(fixture.replicas)
                                for publisher in fixture.publishers:
                                    tasks.start_soon(publish, publisher)
                                await doomed.update(version)
                        except* RuntimeError:
                            pass
                        fixture.post.close(COORDINATOR)
                assert len(outcomes) == 2 and all("whether it had decided is not known" in text for text in outcomes)
                async with open_coordinator(fixture.post.open(COORDINATOR), plan, log) as again:
                    await again.wait_held(fixture.replicas, version if decided else 1)
                    assert again.committed == (version if decided else 1)
                    if decided:
                        await fixture.flip(version)
                        fixture.check(version)
                    else:
                        assert {replica.step_boundary() for replica in fixture.replicas.values()} == {1}
                        fixture.check(1, before)
                (tmp_path / "log").write_bytes(log.read_bytes())
                fixture.post.close(COORDINATOR)

    run(body)


def test_a_cancelled_publish_reads_nothing_any_more_and_aborts_the_version(tmp_path: Path) -> None:
    """INV-2: once `publish` has ended, the shards may change; the version is aborted, the next one is whole."""

    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log") as fixture:
            before = await fixture.begin()
            version, seen = 1, set()
            for steps in (0, 1, 3, 10, 30, 100, 300):
                version += 1
                left: list[int] = []

                async def cut(version: int = version, steps: int = steps, left: list[int] = left) -> None:
                    try:
                        with anyio.CancelScope() as scope:
                            async with anyio.create_task_group() as tasks:

                                async def stop() -> None:
                                    for _ in range(steps):
                                        await anyio.lowlevel.checkpoint()
                                    scope.cancel()

                                tasks.start_soon(stop)
                                await fixture.publishers[0].publish(version)
                                tasks.cancel_scope.cancel()
                    finally:  # also when the update was made to be over before this task was
                        left.append(sum(peer.ops_in_flight for peer in fixture.fabrics["trainer-0"].statistics().peers))

                async def other(version: int = version) -> None:
                    try:
                        await fixture.publishers[1].publish(version)
                    except af.BrokenError:
                        pass

                committed: list[int] = []

                async def update(version: int = version, committed: list[int] = committed) -> None:
                    try:
                        committed.append((await fixture.coordinator.update(version)).version)
                    except af.BrokenError:
                        committed.append(0)

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(cut)
                    tasks.start_soon(other)
                    tasks.start_soon(update)
                    coordinator = fixture.coordinator
                    while not committed:
                        await anyio.lowlevel.checkpoint()
                        if (
                            left
                            and coordinator._updates._update is None
                            and "trainer-0" not in coordinator._updates.proposals
                        ):
                            break  # it was withdrawn before it began, and is waited for again
                    tasks.cancel_scope.cancel()
                assert left == [0]
                seen.add(tuple(committed) > (0,))
                if fixture.coordinator.committed == version:
                    before = fixture.expected()
                    serving = version
                    await fixture.flip(version)
                else:
                    serving = fixture.coordinator.committed
                    assert {replica.step_boundary() for replica in fixture.replicas.values()} == {serving}
                fixture.check(serving, before)
                fixture.change(1)
            assert False in seen
            version += 1
            await fixture.bring(version)

    run(body)
