"""Actors in two real processes over the real link: answers, errors, cancelled transfers, kill -9, a successor."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from actor_messages import Add, Break, Fail, Relay, Wait, Waiting, Write
from processes import PATIENCE, Process

from asyncfabric.actors import Actor, ActorDied, Identity, Node, Reference, RemoteError, handles, open_node
from asyncfabric.control.zmq_link import Link, LinkConfig, open_link
from asyncfabric.errors import PeerError

pytestmark = [pytest.mark.trio, pytest.mark.slow]


class Home(Actor):
    @handles(Add)
    async def add(self, message: Add) -> int:
        return message.a + message.b


@asynccontextmanager
async def near(folder: Path) -> AsyncIterator[tuple[Node, Link]]:
    with trio.fail_after(PATIENCE):
        async with (
            open_link("near", config=LinkConfig(ipc_folder=str(folder))) as link,
            open_node("near", link) as node,
        ):
            yield node, link


async def meet(far: Process, link: Link) -> Identity:
    address = (await trio.to_thread.run_sync(far.receive))["address"]
    return await link.connect(address)


async def end(far: Process) -> None:
    assert far.child.stdin is not None
    far.child.stdin.close()
    assert await trio.to_thread.run_sync(far.child.wait, PATIENCE) == 0


async def answer_of_the_next_life(worker: Reference) -> int:
    """Ask until the supervisor over there has made it: between two lives a name is answered with ActorDied."""
    while True:
        try:
            return await worker.named().ask(Add(1, 1))
        except ActorDied as error:
            assert "broken on demand" in str(error)


async def test_asking_another_process(tmp_path: Path) -> None:
    with Process("actor_home.py", "far", str(tmp_path)) as far:
        async with near(tmp_path) as (node, link):
            worker = await node.lookup(await meet(far, link), "worker")
            assert await worker.ask(Add(20, 3)) == 23
            with pytest.raises(RemoteError, match="raised LookupError: no such page") as caught:
                await worker.ask(Fail())
            assert "actor_home.py" in caught.value.traceback
            home = await node.spawn(Home, name="home")
            assert await worker.ask(Relay(home, 1, 2)) == 3
            with pytest.raises(ActorDied, match="broken on demand") as died:
                await worker.ask(Break())
            assert died.value.origin == worker.label
            assert "raise InternalError" in died.value.traceback
            assert await answer_of_the_next_life(worker) == 2
            await end(far)


async def test_cancelling_an_ask_drains_its_transfers_over_there(tmp_path: Path) -> None:
    with Process("actor_home.py", "far", str(tmp_path)) as far:
        async with near(tmp_path) as (node, link):
            worker = await node.lookup(await meet(far, link), "worker")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(worker.ask, Write())
                nursery.start_soon(worker.ask, Wait())
                while not {"writing", "waiting"} <= set(await worker.ask(Waiting())):
                    pass
                nursery.cancel_scope.cancel()
            # Both asks have ended, so both handlers have, and the fabric waits for nothing.
            assert sorted(await worker.ask(Waiting())) == ["cancelled", "drained", "waiting", "writing"]
            await end(far)


async def test_a_killed_process_fails_its_askers_and_its_successor_answers(tmp_path: Path) -> None:
    async with near(tmp_path) as (node, link):
        with Process("actor_home.py", "far", str(tmp_path)) as far:
            first = await meet(far, link)
            worker = await node.lookup(first, "worker")
            async with trio.open_nursery() as nursery:

                async def ask() -> None:
                    with pytest.raises(ActorDied) as caught:
                        await worker.ask(Wait())
                    assert isinstance(caught.value.__cause__, PeerError)

                nursery.start_soon(ask)
                while "waiting" not in await worker.ask(Waiting()):
                    pass
                far.child.kill()
        with Process("actor_home.py", "far", str(tmp_path)) as far:
            second = await meet(far, link)
            assert (first.name, first != second) == (second.name, True)
            assert await (await node.lookup(second, "worker")).ask(Add(1, 2)) == 3
            with pytest.raises(ActorDied):
                await worker.ask(Add(1, 1))
            await end(far)
