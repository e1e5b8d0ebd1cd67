"""What an update does before it may: rows reported before they are there, messages sent before the disk has them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from anyio.lowlevel import checkpoint
from test_weight_devices import tensors_over, torch, torch_everywhere
from weight_fixture import Fixture, open_fixture, random_shard, run, small_plan

import asyncfabric as af
from asyncfabric.weights import Mesh, Move, Plan, Relay, alone, messages, place, plan_weights
from asyncfabric.weights.coordinator.decision import Phase
from asyncfabric.weights.memory.device import Sums
from asyncfabric.weights.memory.gpu.device import TorchDevice
from asyncfabric.weights.messages import Opened, Roster, Written
from asyncfabric.weights.receiver import intake
from asyncfabric.weights.receiver.intake import Intake, compared_soon
from asyncfabric.weights.sender import pipeline
from asyncfabric.weights.writing import report_messages

SIDE = 256
MIXED = "fault+local?reorder=8&delay_us=200&seed=7"


def shared_plan() -> Plan:
    """Matrices that both receivers of a replica want whole: each gets some from the trainer, and forwards those."""
    held, wanted = (place((SIDE, SIDE), Mesh.of({name: count}), {}) for name, count in (("fsdp", 1), ("tp", 2)))
    moves = [
        Move(f"w{number}", "bfloat16", held, f"w{number}", "float8_e4m3fn", alone(wanted), 128) for number in range(8)
    ]
    return plan_weights(moves, trainers=1, receivers=2, replicas=["a"], relay=Relay(node_ranks=2), chunk_bytes=1 << 14)


def shared_shard(rank: int, name: str) -> Any:
    values = np.random.default_rng(int(name[1:])).standard_normal((SIDE, SIDE), np.float32)
    return (values.view(np.uint32) >> 16).astype("<u2")


@contextmanager
def reported_as(after: Any) -> Iterator[list[int]]:
    """Let trainers send another number of arrivals; the list has what they would have sent."""
    stated: list[int] = []

    def changed(version: int, rows: Any, sums: Any, kind: Any, count: int = 0) -> Iterator[Written]:
        stated.append(count)
        return report_messages(version, rows, sums, kind, after(count))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "report_messages", changed)
        yield stated


@contextmanager
def judged_before_arrival() -> Iterator[list[int]]:
    """Count rows that were reported before they were there."""
    coming: list[int] = []
    take_all = Intake.take_all

    def counting(self: Intake, words: Sequence[tuple[str, Written]], **more: Any) -> None:
        before = self._coming
        take_all(self, words, **more)
        coming.append(self._coming - before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Intake, "take_all", counting)
        yield coming


@pytest.mark.parametrize("rail", ["local", "fault+local?delay_us=30000", MIXED])
@pytest.mark.parametrize("receivers", [True, False])
def test_rows_are_reported_before_they_are_there_and_checked_when_they_are(
    tmp_path: Path, rail: str, receivers: bool
) -> None:
    async def body() -> None:
        with torch_everywhere(True, receivers), judged_before_arrival() as coming:
            async with open_fixture(
                small_plan(), random_shard, tmp_path / "log", rail=rail, given=lambda rank, held: tensors_over(held)
            ) as fixture:
                for version in (1, 2):
                    await fixture.bring(version)
                    fixture.change(version)
        assert sum(coming) > 0 or rail == "local"

    run(body)


def test_rows_that_were_looked_at_too_early_are_looked_at_again_before_others_need_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both receivers wait for rows that the other one forwards: neither may wait until all its rows are there."""
    looked: set[tuple[int, ...]] = set()

    async def early(found: Sums, sums: list[int]) -> list[bool]:
        """As if other rows had come first."""
        if (reported := tuple(sums)) in looked:
            return await compared_soon(found, sums)
        looked.add(reported)
        return [False] * len(sums)

    monkeypatch.setattr(intake, "compared_soon", early)

    async def body() -> None:
        with torch_everywhere(), anyio.fail_after(20):
            async with open_fixture(
                shared_plan(),
                shared_shard,
                tmp_path / "log",
                rail="fault+local?delay_us=20000",
                given=lambda rank, held: tensors_over(held),
            ) as fixture:
                await fixture.bring(1)

    run(body)
    assert looked


def test_arrivals_that_never_come_are_refused_by_name(tmp_path: Path) -> None:
    async def body() -> None:
        with torch_everywhere(), reported_as(lambda count: count + 1000):
            async with open_fixture(
                small_plan(), random_shard, tmp_path / "log", given=lambda rank, held: tensors_over(held)
            ) as fixture:
                with pytest.raises(af.BrokenError, match=r"trainer-\d states 10\d\d writes of \d+"):
                    await fixture.update(1)

    run(body)


def test_units_are_converted_while_receivers_open_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the first write may wait for, and no more."""
    monkeypatch.setattr(TorchDevice, "first_unit_bytes", 1)  # a box each
    monkeypatch.setattr("asyncfabric.weights.sender.scratch.UNITS_STAGED", 1 << 20)
    filled: list[int] = []
    fill = pipeline.UnitFiller.fill
    monkeypatch.setattr(pipeline.UnitFiller, "fill", lambda *words: filled.append(1) or fill(*words))

    async def body() -> None:
        with torch_everywhere():
            async with open_fixture(
                small_plan(trainers=1, names=("a",)),
                lambda rank, name: random_whole(name),
                tmp_path / "log",
                given=lambda rank, held: tensors_over(held),
            ) as fixture:
                trainer, opened, here = fixture.publishers[0], [], anyio.Event()
                take = trainer._take_message

                def late(sender: str, event: Any) -> None:
                    if isinstance(event, Opened):
                        opened.append((sender, event))
                        here.set()
                    else:
                        take(sender, event)

                monkeypatch.setattr(trainer, "_take_message", late)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(fixture.update, 1)
                    await here.wait()
                    while len(filled) < pipeline.UNITS_AHEAD:  # noqa: ASYNC110  # nobody notifies
                        await anyio.sleep(0.001)
                    for _ in range(300):
                        await checkpoint()
                    assert len(filled) == pipeline.UNITS_AHEAD
                    monkeypatch.setattr(trainer, "_take_message", take)
                    for each in opened:
                        take(*each)
                    trainer._changed.notify()
                assert len(filled) > pipeline.UNITS_AHEAD
                await fixture.flip(1)
                fixture.check(1)

    run(body)


def random_whole(name: str) -> Any:
    return np.concatenate([random_shard(rank, name) for rank in range(2)])


class SlowDisk:
    """A decision log that takes the beginning of a version when it is allowed to."""

    def __init__(self, fixture: Fixture, failure: Exception | None = None) -> None:
        self.asked, self.go, self.failure = threading.Event(), threading.Event(), failure
        self._begin = fixture.coordinator._updates.log.begin
        fixture.coordinator._updates.log.begin = self.begin  # type: ignore[method-assign]

    def begin(self, version: int, manifest: str) -> None:
        self.asked.set()
        assert self.go.wait(60)
        if self.failure is not None:
            raise self.failure
        self._begin(version, manifest)


def received_by(fixture: Fixture, word: type) -> list[Any]:
    """Everybody's messages of a kind, from now on."""
    found: list[Any] = []
    deliver = fixture.post.deliver

    def noting(sender: str, to: str, data: bytes) -> None:
        message = messages.decode_message(data)
        if isinstance(message, word):
            found.append((to, message))
        deliver(sender, to, data)

    fixture.post.deliver = noting  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("in_place", [False, True])
def test_receivers_open_their_memory_while_the_beginning_is_on_its_way_to_the_disk(
    tmp_path: Path, in_place: bool
) -> None:
    """WC-6: nobody writes meanwhile. Who would stop serving for it is asked when it is there."""

    async def body() -> None:
        async with open_fixture(
            small_plan(), random_shard, tmp_path / "log", shadow=lambda name: not (in_place and name == "b/0")
        ) as fixture:
            disk, rosters = SlowDisk(fixture), received_by(fixture, Roster)
            written = received_by(fixture, Written)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(fixture.update, 1)
                await anyio.to_thread.run_sync(disk.asked.wait, 60)
                machine = fixture.coordinator._updates.machine
                if in_place:
                    for _ in range(50):
                        await checkpoint()
                    assert machine.phase is Phase.IDLE and not rosters
                else:
                    for _ in range(1000):
                        await checkpoint()
                    assert machine.phase is Phase.PREPARING and rosters and not machine.awaited
                assert not written
                disk.go.set()
            await fixture.flip(1)
            fixture.check(1)

    run(body)


def test_a_beginning_that_the_disk_refuses_is_an_abort_and_its_number_is_taken(tmp_path: Path) -> None:
    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log") as fixture:
            before = await fixture.begin()
            disk = SlowDisk(fixture, af.BrokenError("no room"))
            disk.go.set()
            with pytest.raises(af.BrokenError, match=r"version 2 was not committed: .*no room"):
                await fixture.update(2)
            fixture.check(1, before)
            disk.failure = None
            assert fixture.coordinator.begun == 2
            with pytest.raises(ValueError, match="version must be greater than 2, got 2"):
                await fixture.coordinator.update(2)
            await fixture.bring(3)

    run(body)


@pytest.mark.parametrize("quick", [True, False])
def test_a_slow_disk_takes_the_decision_on_a_thread(tmp_path: Path, quick: bool) -> None:
    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log") as fixture:
            log, threads = fixture.coordinator._updates.log, list[int]()
            begin, commit = log.begin, log.commit

            def begun(version: int, manifest: str) -> None:
                begin(version, manifest)
                log.took_s = 0.0 if quick else 0.01

            def committed(version: int) -> None:
                threads.append(threading.get_ident())
                commit(version)

            log.begin, log.commit = begun, committed  # type: ignore[method-assign]
            report = await fixture.bring(1)
            assert report.decide_s > 0
            assert [thread == threading.get_ident() for thread in threads] == [quick]

    run(body)


@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_a_unit_that_is_brought_late_is_reported_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Everything before it is written and reported by then, and nothing is in line."""
    monkeypatch.setattr(TorchDevice, "first_unit_bytes", 1)

    async def body() -> None:
        shards = {each: random_whole(each) for each in ("gate", "up", "down")}

        def bring(where: tuple[slice, ...]) -> Any:
            threading.Event().wait(0.2)
            return tensors_over({name: shards[name]})[name].view(torch.int16)[where]

        with torch_everywhere(), anyio.fail_after(20):
            async with open_fixture(
                small_plan(trainers=1, names=("a",)),
                lambda rank, each: shards[each],
                tmp_path / "log",
                given=lambda rank, held: tensors_over(held) | {name: bring},
            ) as fixture:
                await fixture.bring(1)

    run(body)


def test_a_flipped_byte_of_rows_that_were_reported_ahead_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        with torch_everywhere(), judged_before_arrival() as coming:
            async with open_fixture(
                small_plan(),
                random_shard,
                tmp_path / "log",
                rail="fault+local?delay_us=30000",
                given=lambda rank, held: tensors_over(held),
            ) as fixture:
                before = await fixture.begin()
                victim, right = fixture.replicas["b/1"], Intake._right

                async def flipped(
                    self: Intake, rows: list[int], sums: list[int], kind: Any, reported: Any = None
                ) -> list[bool]:
                    if self.copy in victim._versions.copies:
                        place = self.places.places(rows[0])[0]
                        self.copy.memory[place] |= 0xFF  # what is wrong is looked at several times
                        self.copy.memory[place] ^= 0x10
                    return await right(self, rows, sums, kind, reported)

                monkeypatch.setattr(Intake, "_right", flipped)
                with pytest.raises(af.BrokenError, match=r"b/1: .*wrong bytes.*trainer-"):
                    await fixture.update(2)
                monkeypatch.undo()
                for replica in fixture.replicas.values():
                    assert replica.step_boundary() == 1
                fixture.check(1, before)
                await fixture.bring(3)
        assert sum(coming) > 0

    run(body)
