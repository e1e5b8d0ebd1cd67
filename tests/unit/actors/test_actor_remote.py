"""Actors of another node, over the fake link and over the real one: the same as here, and what only distance brings."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing
from actor_cast import Add, Break, Fail, Note, Wait
from actor_links import KINDS, Opener, link_opener
from actor_two_nodes import FarWorker, Local, Relay, Trace, two_nodes, until

from asyncfabric.actors import (
    ActorDied,
    Message,
    Policy,
    Reference,
    RemoteError,
    handles,
    trace_context,
)
from asyncfabric.errors import PeerError

pytestmark = pytest.mark.trio


@pytest.fixture(params=KINDS)
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    return link_opener(str(request.param), tmp_path)


async def test_the_same_as_here(opener: Opener) -> None:
    async with two_nodes(opener) as two:
        assert two.worker == two.far.reference("worker")
        assert await two.worker.ask(Add(2, 3)) == 5
        await two.worker.tell(Note(7))
        assert await two.worker.named().ask(Add(1, 1)) == 2
        assert two.log == [7]


async def test_errors_travel_with_their_traceback(opener: Opener) -> None:
    async with two_nodes(opener) as two:
        with pytest.raises(RemoteError, match="raised LookupError: no page") as caught:
            await two.worker.ask(Fail("no page"))
        assert caught.value.kind == "LookupError"
        assert caught.value.origin == two.worker.label == "worker#1 on far"
        assert "raise LookupError(message.text)" in caught.value.traceback
        assert await two.worker.ask(Add(1, 1)) == 2


async def test_a_reference_in_a_message_leads_back(opener: Opener) -> None:
    async with two_nodes(opener) as two:
        home = await two.near.spawn(FarWorker, [], trio.Event(), name="home")
        assert await two.worker.ask(Relay(home, 20, 3)) == 23
        await two.near.stop("home")
        with pytest.raises(RemoteError, match="raised ActorDied"):
            await two.worker.ask(Relay(home, 20, 3))


async def test_a_death_notifies_all_who_wait_and_later_ones(opener: Opener) -> None:
    errors: list[ActorDied] = []

    async def asker(message: Message[object]) -> None:
        with pytest.raises(ActorDied, match="broken on demand") as caught:
            await two.worker.ask(message)
        errors.append(caught.value)

    async with two_nodes(opener) as two:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.worker.ask, Wait())
            await until(two.log, "waiting")
            nursery.start_soon(asker, Break())
            await trio.testing.wait_all_tasks_blocked(0.01)
            for _ in range(6):
                nursery.start_soon(asker, Add(1, 1))
            await trio.testing.wait_all_tasks_blocked(0.01)
            two.gate.set()
        assert {error.origin for error in errors} == {"worker#1 on far"}
        assert all("raise InternalError" in error.traceback for error in errors)
        await trio.testing.wait_all_tasks_blocked(0.01)
        with pytest.raises(ActorDied, match="restarted as #2 after: InternalError"):
            await two.worker.ask(Add(1, 1))
        assert await two.worker.named().ask(Add(1, 1)) == 2


async def test_cancelling_an_ask_ends_its_handler_first(opener: Opener) -> None:
    async with two_nodes(opener) as two:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.worker.ask, Wait())
            await until(two.log, "waiting")
            nursery.cancel_scope.cancel()
        assert two.log == ["waiting", "cancelled", "drained"]
        assert await two.worker.ask(Add(1, 1)) == 2


async def test_a_cancelled_ask_waits_for_its_handler_also_when_the_actor_dies(opener: Opener) -> None:
    class Drainer(FarWorker):
        concurrency = 2

        @handles(Wait)
        async def wait(self, message: Wait) -> str:
            try:
                await trio.sleep_forever()
            finally:
                self.log.append("draining")
                with trio.CancelScope(shield=True):
                    await self.gate.wait()
                self.log.append("drained")

    async def asker(scope: trio.CancelScope) -> None:
        with scope:
            await drainer.ask(Wait())
        two.log.append("ended")

    async with two_nodes(opener) as two:
        here = await two.far.spawn(Drainer, two.log, two.gate, name="drainer")
        drainer = await two.near.lookup(two.far.identity, here.name)
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()
            nursery.start_soon(asker, scope)
            await trio.testing.wait_all_tasks_blocked(0.01)
            scope.cancel()
            await until(two.log, "draining")
            with pytest.raises(ActorDied):
                await drainer.ask(Break())
            await trio.testing.wait_all_tasks_blocked(0.02)
            two.gate.set()
        assert two.log == ["draining", "drained", "ended"]


async def test_cancelled_messages_that_wait_are_taken_back(opener: Opener) -> None:
    async with two_nodes(opener) as two:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.worker.ask, Wait())
            await until(two.log, "waiting")
            async with trio.open_nursery() as cancelled:
                for number in range(2, 102):  # more than the window lets through
                    cancelled.start_soon(two.worker.ask, Note(number))
                await trio.testing.wait_all_tasks_blocked(0.02)
                cancelled.cancel_scope.cancel()
            await two.worker.tell(Note(500))
            two.gate.set()
        assert await two.worker.ask(Add(1, 1)) == 2
        assert two.log == ["waiting", 500]


async def test_a_full_mailbox_makes_tellers_wait_and_keeps_their_order(opener: Opener) -> None:
    reported: list[int] = []

    async def sender() -> None:
        for number in range(10):
            await two.worker.tell(Note(number))
            reported.append(number)

    async with two_nodes(opener) as two:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.worker.ask, Wait())
            await until(two.log, "waiting")
            nursery.start_soon(sender)
            while len(reported) < 2:
                await trio.testing.wait_all_tasks_blocked(0.001)
            await trio.testing.wait_all_tasks_blocked(0.02)
            assert reported == [0, 1]
            two.gate.set()
        assert await two.worker.ask(Add(0, 0)) == 0
        assert two.log == ["waiting", *range(10)]


async def test_many_askers_of_one_full_actor_are_all_answered(opener: Opener) -> None:
    answers: list[int] = []

    async def asker(number: int) -> None:
        answers.append(await two.worker.ask(Add(number, 0)))

    async with two_nodes(opener) as two:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.worker.ask, Wait())
            await until(two.log, "waiting")
            for number in range(200):
                nursery.start_soon(asker, number)
            await trio.testing.wait_all_tasks_blocked(0.01)
            two.gate.set()
        assert sorted(answers) == list(range(200))


async def test_misuse_is_the_same_from_afar(opener: Opener) -> None:
    class Unknown(Message[None]):
        pass

    class Odd(Message[None]):
        what: object

    async with two_nodes(opener) as two:
        with pytest.raises(TypeError, match="no handler for Unknown; it handles Add"):
            await two.worker.ask(Unknown())
        with pytest.raises(TypeError, match="Odd cannot be sent to another process"):
            await two.worker.ask(Odd(object()))
        with pytest.raises(RemoteError, match="TypeError: Encoding objects of type"):
            await two.worker.ask(Local())
        with pytest.raises(ActorDied, match="nothing of that name"):
            await two.near.lookup(two.far.identity, "nobody")
        with pytest.raises(ActorDied, match="nothing of that name"):
            await Reference(two.far.identity, "nobody", 4).ask(Add(1, 1))
        assert await two.worker.ask(Add(1, 1)) == 2


async def test_the_trace_context_travels(opener: Opener) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with two_nodes(opener) as two:
        assert await two.worker.ask(Trace()) is None
        token = trace_context.set(trace)
        assert await two.worker.ask(Trace()) == trace
        home = await two.near.spawn(FarWorker, [], trio.Event(), name="home")
        assert await home.ask(Trace()) == trace
        trace_context.reset(token)
        assert await home.ask(Trace()) is None


async def test_a_lost_node_fails_its_askers_and_frees_what_it_asked_for(opener: Opener) -> None:
    async with two_nodes(opener) as two, trio.open_nursery() as nursery:

        async def asker() -> None:
            with pytest.raises(ActorDied, match=r"worker#1 on far died: .*far") as caught:
                await two.worker.ask(Wait())
            assert isinstance(caught.value.__cause__, PeerError)
            two.log.append("reported")

        nursery.start_soon(asker)
        await until(two.log, "waiting")
        await two.near_link.disconnect(two.far.identity)
        await until(two.log, "reported")
        await until(two.log, "drained")
        with pytest.raises(ActorDied):
            await two.worker.ask(Add(1, 1))


class Provoke(Message[None]):
    to: Reference


async def test_the_first_cause_is_reported_across_nodes(opener: Opener) -> None:
    class Middle(FarWorker):
        @handles(Provoke)
        async def provoke(self, message: Provoke) -> None:
            await message.to.ask(Break())

    async with two_nodes(opener) as two:
        supervisor = await two.near.supervise("s", Policy(restarts=1))
        victim = await supervisor.spawn(FarWorker, [], trio.Event(), name="victim")
        here = await two.far.spawn(Middle, [], trio.Event(), name="middle")
        middle = await two.near.lookup(two.far.identity, here.name)
        with pytest.raises(RemoteError, match="middle#2 on far raised ActorDied") as caught:
            await middle.ask(Provoke(victim))
        assert (caught.value.actor, caught.value.origin) == ("middle#2 on far", "s/victim#1 on near")
        assert "broken on demand" in caught.value.traceback
