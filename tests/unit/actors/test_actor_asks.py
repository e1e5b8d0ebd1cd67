"""Messages to actors of one node: answers, errors, cancellation, full mailboxes, misuse."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from actor_cast import Add, AskOther, Break, Fail, Note, Wait, Who, Worker

from asyncfabric.actors import ActorDied, Message, Policy, Reference, RemoteError, handles, open_node
from asyncfabric.errors import ClosedError

pytestmark = pytest.mark.trio


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
        assert caught.value.origin == worker.label
        assert "raise LookupError(message.text)" in caught.value.traceback
        assert isinstance(caught.value.__cause__, LookupError)
        assert await worker.ask(Add(1, 1)) == 2


async def test_the_first_failure_of_a_group_is_reported() -> None:
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
    assert [error.origin for error in errors] == [worker.label] * 5


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
    reported: list[int] = []
    async with open_node("here") as node:
        worker = await node.spawn(Worker, log, gate, name="worker")

        async def sender() -> None:
            for number in range(10):
                await worker.tell(Note(number))
                reported.append(number)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.ask, Wait())
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(sender)
            await trio.testing.wait_all_tasks_blocked()
            assert reported == [0, 1]
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
