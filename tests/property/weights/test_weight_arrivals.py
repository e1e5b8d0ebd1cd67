"""Arrivals at a replica in chosen orders: one that was dropped changes nothing that serves, however late it ends."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from weight_fixture import Fixture, open_fixture, random_shard, run, small_plan

import asyncfabric as af
from asyncfabric.control import LocalChannels
from asyncfabric.weights.channel import WEIGHT_CODEC
from asyncfabric.weights.messages import (
    Abort,
    CatchUp,
    Given,
    Prepare,
    Want,
    WeightMessage,
    decode_message,
    encode_message,
)
from asyncfabric.weights.outbox import Outbox
from asyncfabric.weights.receiver import copies as copies_module
from asyncfabric.weights.update import COORDINATOR, WeightReplica, open_replica

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")

LATE = "late/0"
ORDERS = ((0, 1), (1, 0))  # of the arrivals that begin in one burst of messages: a scheduler may choose either


class Carried:
    """The tasks of a replica. Those that carry arrivals can be held, and begun in a chosen order."""

    def __init__(self, late: WeightReplica) -> None:
        self._tasks = late._versions._tasks
        self.ended: list[anyio.Event] = []
        self.held: list[Callable[[], Awaitable[None]]] | None = None
        late._versions._tasks = self  # type: ignore[assignment]

    def start_soon(self, work: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        if work.__name__ != "_carry":
            self._tasks.start_soon(work, *arguments)
            return
        ended = anyio.Event()
        self.ended.append(ended)

        async def carry() -> None:
            try:
                await work(*arguments)
            finally:
                ended.set()

        if self.held is None:
            self._tasks.start_soon(carry)
        else:
            self.held.append(carry)

    async def begin(self, order: tuple[int, ...]) -> None:
        assert self.held is not None
        held, self.held = self.held, None
        assert len(held) == len(order)
        for number in order:
            self._tasks.start_soon(held[number])
            await anyio.wait_all_tasks_blocked()


class Kept:
    """Messages that are kept back until they are let go."""

    def __init__(self, fixture: Fixture, kind: type, who: str) -> None:
        self._deliver = fixture.post.deliver
        self._kind: type | None = kind
        self._who = who
        self.messages: list[tuple[str, str, bytes]] = []
        fixture.post.deliver = self._take  # type: ignore[method-assign]

    def _take(self, sender: str, to: str, data: bytes) -> None:
        if self._kind is not None and self._who in (sender, to) and isinstance(decode_message(data), self._kind):
            self.messages.append((sender, to, data))
        else:
            self._deliver(sender, to, data)

    def let_go(self) -> None:
        self._kind = None
        for one in self.messages:
            self._deliver(*one)


def coordinate(fixture: Fixture, *messages: WeightMessage) -> None:
    """Let the late receiver receive these from the coordinator."""
    for message in messages:
        fixture.post.deliver(COORDINATOR, LATE, encode_message(message))


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await anyio.lowlevel.checkpoint()


def serve(late: WeightReplica, fixture: Fixture) -> None:
    """Let version 1 serve at the late receiver, and compare it."""
    assert late.step_boundary() == 1
    wanted, found = fixture.replicas["a/0"].tensors(), late.tensors()
    assert set(found) == set(wanted) and all(np.array_equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("order", ORDERS)
def test_a_dropped_fetch_that_ends_late_does_not_stand_for_the_next_one_of_the_same_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...]
) -> None:
    """Its last checksums are on a thread when it is dropped for another version, which is then aborted."""
    hashing, go_on = threading.Event(), threading.Event()
    sums = copies_module._sums

    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log") as fixture:
            await fixture.update(1)
            await fixture.flip(1)
            plan, post = fixture.plan, fixture.post.open(LATE)
            async with af.open_fabric() as fabric, open_replica(fabric, post, plan, "late", 0) as late:
                carried = Carried(late)

                def held_up(copy: Any, kind: Any) -> Any:
                    if copy in late._versions.copies and not hashing.is_set():
                        hashing.set()
                        go_on.wait(30)
                    return sums(copy, kind)

                monkeypatch.setattr(copies_module, "_sums", held_up)
                await until(hashing.is_set)
                wants, carried.held = Kept(fixture, Want, LATE), []
                coordinate(
                    fixture, Prepare(2, late._versions._plans.geometry), Abort(2, "by choice"), CatchUp(1, "a/0")
                )
                await anyio.wait_all_tasks_blocked()
                await carried.begin(order)
                go_on.set()
                await carried.ended[0].wait()
                await anyio.wait_all_tasks_blocked()
                version = late.step_boundary()
                assert (version, bool(late.tensors())) == (0, False)
                assert late.failure == ""
                wants.let_go()
                await late.wait_version(1)
                serve(late, fixture)
                fixture.post.close(LATE)

    run(body)


@pytest.mark.parametrize("order", ORDERS)
def test_a_dropped_arrival_that_comes_to_its_turn_last_leaves_what_is_complete(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    """It was dropped before it began, and the fetch that took its place may have begun before it."""

    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log") as fixture:
            await fixture.update(1)
            await fixture.flip(1)
            plan, post = fixture.plan, fixture.post.open(LATE)
            async with af.open_fabric() as fabric, open_replica(fabric, post, plan, "late", 0) as late:
                carried, answers = Carried(late), Kept(fixture, Given, LATE)
                await until(lambda: bool(answers.messages))
                carried.held = []
                coordinate(
                    fixture, Prepare(2, late._versions._plans.geometry), Abort(2, "by choice"), CatchUp(1, "a/0")
                )
                await anyio.wait_all_tasks_blocked()
                await carried.begin(order)
                answers.let_go()  # one is of the fetch that was dropped
                for ended in carried.ended:
                    await ended.wait()
                serve(late, fixture)
                assert late.failure == ""
                fixture.post.close(LATE)

    run(body)


def test_a_version_in_no_copy_is_an_error_and_what_served_serves_on(tmp_path: Path) -> None:
    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log") as fixture:
            before = await fixture.begin()
            await fixture.update(2)
            for replica in fixture.replicas.values():
                next(copy for copy in replica._versions.copies if copy.version == 2).version = 0
                next(copy for copy in replica._versions.copies if copy.version == 0).arrival = 0
                for _ in range(2):
                    with pytest.raises(af.InternalError, match=r"version 2 came with arrival 2, but the copies hold"):
                        replica.step_boundary()
            fixture.check(1, before)

    run(body)


def test_a_version_that_begins_without_its_roster_is_refused_by_that_name(tmp_path: Path) -> None:
    """The digests of the plans are equal; what differs is the version of the roster."""

    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log") as fixture:
            await fixture.update(1)
            await fixture.flip(1)
            replica = fixture.replicas["a/0"]
            fixture.post.deliver(COORDINATOR, "a/0", encode_message(Prepare(2, replica._versions._plans.geometry)))
            await until(lambda: replica.failure != "")
            assert replica.failure.startswith(
                "the roster of version 2, which lists its replicas, did not arrive here before the version began: "
                "the last roster here is that of version 1"
            )
            await fixture.bring(3)

    run(body)


def test_what_is_sent_when_the_senders_have_ended_is_dropped() -> None:
    async def body() -> None:
        post = LocalChannels(WEIGHT_CODEC)
        words, other = Outbox(post.open("a"), "a"), post.open("b")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(words.run)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        words.put("b", Abort(1, "late"))
        assert [event for _, event in other.take_nowait() if isinstance(event, Abort)] == []

    run(body)


class LateTurn:
    """A turn that was given just as its receiver was left: who has it goes on when the others have ended."""

    def __init__(self, ended: anyio.Event) -> None:
        self.taken = anyio.Event()
        self._ended = ended

    async def __aenter__(self) -> None:
        self.taken.set()
        with anyio.CancelScope(shield=True):
            await self._ended.wait()

    async def __aexit__(self, *_: object) -> None:
        pass


def test_leaving_a_replica_as_an_update_begins_is_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What carries the update has its turn already, and finds that nothing is sent any more."""
    send_all = Outbox.run

    async def body() -> None:
        async with open_fixture(small_plan(), random_shard, tmp_path / "log") as fixture:
            await fixture.update(1)
            await fixture.flip(1)
            ended = anyio.Event()

            async def sending(words: Outbox) -> None:
                try:
                    await send_all(words)
                finally:
                    if words is late._versions._outbox:
                        ended.set()

            monkeypatch.setattr(Outbox, "run", sending)
            plan, post = fixture.plan, fixture.post.open(LATE)
            async with af.open_fabric() as fabric, anyio.create_task_group() as tasks:
                async with open_replica(fabric, post, plan, "late", 0) as late:
                    await late.wait_version(1)
                    assert late.step_boundary() == 1
                    await fixture.coordinator.wait_held([LATE], 1)
                    await anyio.wait_all_tasks_blocked()
                    turn = LateTurn(ended)
                    late._versions._turn = turn  # type: ignore[assignment]
                    tasks.start_soon(fixture.update, 2)
                    await turn.taken.wait()
                fixture.post.close(LATE)
            with pytest.raises(af.ClosedError, match="this replica was left"):
                late.step_boundary()
            await fixture.flip(2)
            fixture.check(2)

    run(body)
