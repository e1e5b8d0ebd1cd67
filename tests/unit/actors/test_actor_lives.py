"""How actors begin and end: starts, deaths and who learns of them, stops, tasks and children."""

from __future__ import annotations

import gc
import weakref

import pytest
import trio
import trio.testing
from actor_cast import Add, Break, Fail, Note, Wait, Worker

from asyncfabric.actors import ActorDied, Message, Policy, Reference, RemoteError, handles, open_node

pytestmark = pytest.mark.trio


async def test_a_failed_handler_ends_the_actor_and_rises_from_the_node() -> None:
    log: list[object] = []
    with pytest.raises(ActorDied, match="worker failed: LookupError") as caught:
        async with open_node("here") as node:
            worker = await node.spawn(Worker, log, name="worker")
            await worker.tell(Fail("gone"))
            await trio.sleep_forever()
    assert isinstance(caught.value.__cause__, LookupError)
    assert caught.value.origin == worker.label
    assert log == ["start", "stop"]


async def test_a_fatal_error_ends_the_actor_and_all_who_wait_learn_of_it_at_once() -> None:
    class Two(Worker):
        concurrency = 2

    log: list[object] = []
    errors: list[ActorDied] = []

    async def asker(worker: Reference, message: Message[object]) -> None:
        with pytest.raises(ActorDied, match="broken on demand") as caught:
            await worker.ask(message)
        errors.append(caught.value)
        log.append("reported")

    async with open_node("here", policy=Policy(restarts=1)) as node:
        gate = trio.Event()
        worker = await node.spawn(Two, log, gate, name="worker")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asker, worker, Wait())
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(asker, worker, Break())
        assert log.count("reported") == 2
        assert "drained" not in log  # at once, not when the last handler is done
    assert [error.origin for error in errors] == [worker.label] * 2
    assert "drained" in log


async def test_old_references_die_and_named_ones_follow() -> None:
    async with open_node("here", policy=Policy(restarts=1)) as node:
        worker = await node.spawn(Worker, name="worker")
        with pytest.raises(ActorDied, match="broken on demand"):
            await worker.ask(Break())
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(ActorDied, match="restarted as #2 after: InternalError") as caught:
            await worker.ask(Add(1, 1))
        assert caught.value.origin == worker.label
        assert await worker.named().ask(Add(1, 1)) == 2
        assert (await node.lookup(node.identity, "worker")).incarnation == 2


async def test_an_actor_that_is_restarted_for_weeks_keeps_none_of_its_former_lives() -> None:
    """The cause of a death holds the life that it ended, by the frames of its traceback."""
    lives: list[weakref.ref[Worker]] = []

    def born() -> Worker:
        actor = Worker()
        lives.append(weakref.ref(actor))
        return actor

    async with open_node("here", policy=Policy(restarts=100)) as node:
        first = await node.spawn(born, name="worker")
        for _ in range(20):
            with pytest.raises(ActorDied, match="broken on demand"):
                await node.reference("worker").ask(Break())
            await trio.testing.wait_all_tasks_blocked()
        assert len(lives) == 21
        with pytest.raises(ActorDied, match="restarted as #21") as caught:
            await first.ask(Add(1, 1))
        assert caught.value.__cause__ is not None
        del caught
        gc.collect()
        living = [number for number, life in enumerate(lives) if life() is not None]
        assert set(living) <= {19, 20}, living  # the present one, and the one that its predecessor's askers get


async def test_a_failed_start_is_reported_to_the_spawner_only() -> None:
    class Stillborn(Worker):
        async def on_start(self) -> None:
            raise OSError("no device")

    async with open_node("here") as node:
        with pytest.raises(ActorDied, match="OSError: no device") as caught:
            await node.spawn(Stillborn, name="worker")
        assert caught.value.origin == "worker#1 on here"
        assert node.supervisor.children == ()
        assert await (await node.spawn(Worker, name="worker")).ask(Add(1, 1)) == 2


async def test_stopping_in_good_order_handles_what_is_in_the_mailbox() -> None:
    class Stopper(Worker):
        @handles(Break)
        async def break_(self, message: Break) -> None:
            self.stop()
            with pytest.raises(ActorDied, match="it was stopped"):
                await self.reference.named().ask(Add(1, 1))

    log: list[object] = []
    gate = trio.Event()
    async with open_node("here") as node:
        worker = await node.spawn(Stopper, log, gate, name="worker")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.ask, Wait())
            await trio.testing.wait_all_tasks_blocked()
            await worker.tell(Break())
            await worker.tell(Note(1))
            gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert log == ["start", "waiting", 1, "stop"]
        assert node.supervisor.children == ()


async def test_an_error_of_on_stop_rises() -> None:
    class Messy(Worker):
        async def on_stop(self) -> None:
            raise OSError("not cleaned")

    with pytest.raises(ActorDied, match="OSError: not cleaned"):
        async with open_node("here") as node:
            await node.spawn(Messy, name="worker")


async def test_on_stop_is_bounded(autojump_clock: trio.testing.MockClock) -> None:
    class Slow(Worker):
        async def on_stop(self) -> None:
            await trio.sleep_forever()

    with pytest.raises(ActorDied, match=r"on_stop took more than 5\.0 s"):
        async with open_node("here") as node:
            await node.spawn(Slow, name="worker")
    assert trio.current_time() < 6


async def test_the_body_of_a_node_raises_as_it_is() -> None:
    with pytest.raises(KeyError):
        async with open_node("here") as node:
            await node.spawn(Worker, name="worker")
            raise KeyError("mine")


async def test_messages_are_handled_at_the_same_time_when_asked_for() -> None:
    class Wide(Worker):
        concurrency = 3

    log: list[object] = []
    gate = trio.Event()
    async with open_node("here") as node:
        worker = await node.spawn(Wide, log, gate, name="worker")
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(worker.ask, Wait())
            await trio.testing.wait_all_tasks_blocked()
            assert log.count("waiting") == 3
            gate.set()
        assert log.count("waiting") == 4


async def test_tasks_and_children_of_an_actor_end_with_it() -> None:
    log: list[object] = []

    class Parent(Worker):
        async def on_start(self) -> None:
            await self.spawn(Worker, self.log, name="child")
            self.start_soon(self.beside)

        async def beside(self) -> None:
            try:
                await trio.sleep_forever()
            finally:
                self.log.append("beside ended")

    async with open_node("here", policy=Policy(restarts=1)) as node:
        parent = await node.spawn(Parent, log, name="parent")
        child = await node.lookup(node.identity, "parent/child")
        with pytest.raises(ActorDied) as caught:
            await child.ask(Break())
        assert caught.value.origin == child.label
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(ActorDied) as caught:
            await parent.ask(Add(1, 1))
        assert caught.value.origin == child.label  # the child failed first, and nobody restarted it
        assert await (await node.lookup(node.identity, "parent/child")).ask(Add(1, 1)) == 2
        assert log.count("beside ended") == 1
    assert log.count("beside ended") == 2
    assert log.count("start") == log.count("stop") - 2 == 2


async def test_who_would_wait_for_its_own_end_gets_an_error() -> None:
    class Suicidal(Worker):
        @handles(Fail)
        async def fail(self, message: Fail) -> None:
            await self.node.stop(message.text)

    async with open_node("here") as node:
        supervisor = await node.supervise("s", Policy())
        worker = await supervisor.spawn(Suicidal, name="worker")
        with pytest.raises(RemoteError, match="ValueError: s/worker#1 on here stops s and waits for its own end"):
            await worker.ask(Fail("s"))
        await worker.ask(Fail("other"))
        assert node.supervisor.children == ("s",)
