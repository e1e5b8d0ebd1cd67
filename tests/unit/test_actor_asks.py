"""Asking and telling actors of one node: answers, errors, cancellation, full mailboxes, deaths."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from asyncfabric.actors import Actor, ActorDied, Message, Policy, Reference, RemoteError, handles, open_node
from asyncfabric.errors import ClosedError, InternalError

pytestmark = pytest.mark.trio


class Add(Message[int]):
    a: int
    b: int


class Fail(Message[None]):
    text: str


class Break(Message[None]):
    """Ends the actor, also when asked."""


class Wait(Message[str]):
    """Answered when the gate opens."""


class Note(Message[None]):
    number: int


class Who(Message[Reference]):
    """Answered with the actor's own reference."""


class AskOther(Message[int]):
    other: Reference


class Worker(Actor):
    mailbox_capacity = 2

    def __init__(self, log: list[object] | None = None, gate: trio.Event | None = None) -> None:
        self.log = log if log is not None else []
        self.gate = trio.Event() if gate is None else gate

    async def on_start(self) -> None:
        self.log.append("start")

    async def on_stop(self) -> None:
        self.log.append("stop")

    @handles(Add)
    async def add(self, message: Add) -> int:
        return message.a + message.b

    @handles(Fail)
    async def fail(self, message: Fail) -> None:
        raise LookupError(message.text)

    @handles(Break)
    async def break_(self, message: Break) -> None:
        raise InternalError("broken on demand")

    @handles(Wait)
    async def wait(self, message: Wait) -> str:
        self.log.append("waiting")
        try:
            await self.gate.wait()
        except trio.Cancelled:
            self.log.append("cancelled")
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()
            self.log.append("drained")
            raise
        return "open"

    @handles(Note)
    async def note(self, message: Note) -> None:
        self.log.append(message.number)

    @handles(Who)
    async def who(self, message: Who) -> Reference:
        return self.reference

    @handles(AskOther)
    async def ask_other(self, message: AskOther) -> int:
        return await message.other.ask(Add(1, 2))


async def test_an_ask_is_answered() -> None:
    async with open_node("here") as node:
        worker = await node.spawn(Worker, name="worker")
        assert await worker.ask(Add(2, 3)) == 5
        assert await worker.ask(Who()) == worker
        assert hash(await node.lookup(node.identity, "worker")) == hash(worker)


async def test_a_failed_ask_is_the_askers_and_the_actor_lives_on() -> None:
    async with open_node("here") as node:
        worker = await node.spawn(Worker, name="worker")
        with pytest.raises(RemoteError, match="worker#1 on here raised LookupError: no page") as caught:
            await worker.ask(Fail("no page"))
        assert caught.value.kind == "LookupError"
        assert caught.value.origin == worker.words
        assert "raise LookupError(message.text)" in caught.value.traceback
        assert isinstance(caught.value.__cause__, LookupError)
        assert await worker.ask(Add(1, 1)) == 2


async def test_the_first_failure_of_a_group_is_told() -> None:
    class Group(Worker):
        @handles(Fail)
        async def fail(self, message: Fail) -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._second)
                await trio.testing.wait_all_tasks_blocked()
                raise LookupError("the first")

        async def _second(self) -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise OSError("the second")

    async with open_node("here") as node:
        worker = await node.spawn(Group, name="worker")
        with pytest.raises(RemoteError, match="raised LookupError: the first") as caught:
            await worker.ask(Fail(""))
        assert caught.value.kind == "LookupError"


async def test_a_failed_tell_ends_the_actor_and_rises_from_the_node() -> None:
    log: list[object] = []
    with pytest.raises(ActorDied, match="worker failed: LookupError") as caught:
        async with open_node("here") as node:
            worker = await node.spawn(Worker, log, name="worker")
            await worker.tell(Fail("gone"))
            await trio.sleep_forever()
    assert isinstance(caught.value.__cause__, LookupError)
    assert caught.value.origin == worker.words
    assert log == ["start", "stop"]


async def test_a_fatal_error_ends_the_actor_and_all_who_wait_hear_of_it_at_once() -> None:
    class Two(Worker):
        concurrency = 2

    log: list[object] = []
    errors: list[ActorDied] = []

    async def asker(worker: Reference, message: Message[object]) -> None:
        with pytest.raises(ActorDied, match="broken on demand") as caught:
            await worker.ask(message)
        errors.append(caught.value)
        log.append("told")

    async with open_node("here", policy=Policy(restarts=1)) as node:
        gate = trio.Event()
        worker = await node.spawn(Two, log, gate, name="worker")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asker, worker, Wait())
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(asker, worker, Break())
        assert log.count("told") == 2
        assert "drained" not in log  # at once, not when the last handler is done
    assert [error.origin for error in errors] == [worker.words] * 2
    assert "drained" in log


async def test_a_death_reaches_the_mailbox_and_the_line() -> None:
    errors: list[ActorDied] = []
    gate = trio.Event()

    async def asker(worker: Reference, message: Message[object]) -> None:
        with pytest.raises(ActorDied, match="broken on demand") as caught:
            await worker.ask(message)
        errors.append(caught.value)

    async with open_node("here", policy=Policy(restarts=1)) as node:
        worker = await node.spawn(Worker, None, gate, name="worker")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.ask, Wait())
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(asker, worker, Break())
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(4):
                nursery.start_soon(asker, worker, Add(0, 0))
            await trio.testing.wait_all_tasks_blocked()
            gate.set()
    assert [error.origin for error in errors] == [worker.words] * 5


async def test_old_references_die_and_named_ones_follow() -> None:
    async with open_node("here", policy=Policy(restarts=1)) as node:
        worker = await node.spawn(Worker, name="worker")
        with pytest.raises(ActorDied, match="broken on demand"):
            await worker.ask(Break())
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(ActorDied, match="restarted as #2 after: InternalError") as caught:
            await worker.ask(Add(1, 1))
        assert caught.value.origin == worker.words
        assert await worker.named().ask(Add(1, 1)) == 2
        assert (await node.lookup(node.identity, "worker")).incarnation == 2


async def test_cancelling_an_ask_cancels_its_handler_and_waits_for_it() -> None:
    log: list[object] = []
    async with open_node("here") as node:
        worker = await node.spawn(Worker, log, name="worker")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.ask, Wait())
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert log == ["start", "waiting", "cancelled", "drained"]
        assert await worker.ask(Add(1, 1)) == 2


async def test_a_cancelled_ask_in_the_mailbox_is_taken_back() -> None:
    log: list[object] = []
    gate = trio.Event()
    async with open_node("here") as node:
        worker = await node.spawn(Worker, log, gate, name="worker")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.ask, Wait())
            await trio.testing.wait_all_tasks_blocked()
            with trio.move_on_after(0):
                await worker.ask(Note(1))
            async with trio.open_nursery() as cancelled:
                for number in (2, 3, 4, 5):  # two in the box, two in line
                    cancelled.start_soon(worker.ask, Note(number))
                await trio.testing.wait_all_tasks_blocked()
                cancelled.cancel_scope.cancel()
            await worker.tell(Note(6))
            gate.set()
        assert await worker.ask(Add(1, 1)) == 2
    assert log == ["start", "waiting", 6, "stop"]


async def test_a_full_mailbox_makes_tellers_wait() -> None:
    log: list[object] = []
    gate = trio.Event()
    told: list[int] = []
    async with open_node("here") as node:
        worker = await node.spawn(Worker, log, gate, name="worker")

        async def teller() -> None:
            for number in range(10):
                await worker.tell(Note(number))
                told.append(number)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.ask, Wait())
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(teller)
            await trio.testing.wait_all_tasks_blocked()
            assert told == [0, 1]
            gate.set()
        assert await worker.ask(Add(0, 0)) == 0
    assert log == ["start", "waiting", *range(10), "stop"]


async def test_misuse_raises_at_the_call() -> None:
    class Unknown(Message[None]):
        pass

    async with open_node("here") as node:
        worker = await node.spawn(Worker, name="worker")
        with pytest.raises(TypeError, match="no handler for Unknown; it handles Add"):
            await worker.ask(Unknown())
        with pytest.raises(TypeError, match="sent a Message, got int"):
            await worker.ask(3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="asks itself"):
            try:
                await worker.ask(AskOther(worker))
            except RemoteError as error:
                assert error.__cause__ is not None
                raise error.__cause__ from None
        with pytest.raises(ValueError, match="'worker' is taken"):
            await node.spawn(Worker, name="worker")
        with pytest.raises(ValueError, match="holds no '/'"):
            await node.spawn(Worker, name="a/b")
        with pytest.raises(TypeError, match="spawn takes an Actor"):
            try:
                await node.spawn(dict, name="dict")  # type: ignore[arg-type]
            except ActorDied as error:
                assert error.__cause__ is not None
                raise error.__cause__ from None
    with pytest.raises(RuntimeError, match="outside of"):
        await Reference(node.identity, "worker", 1).ask(Add(1, 1))
    with pytest.raises(ActorDied):
        await worker.ask(Add(1, 1))
    with pytest.raises(ClosedError):
        await node.spawn(Worker, name="late")


async def test_a_failed_start_is_told_to_the_spawner_only() -> None:
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
        assert caught.value.origin == child.words
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(ActorDied) as caught:
            await parent.ask(Add(1, 1))
        assert caught.value.origin == child.words  # the child failed first, and nobody restarted it
        assert await (await node.lookup(node.identity, "parent/child")).ask(Add(1, 1)) == 2
        assert log.count("beside ended") == 1
    assert log.count("beside ended") == 2
    assert log.count("start") == log.count("stop") - 2 == 2
