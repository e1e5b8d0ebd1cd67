"""A watcher learns of each session that ended, also when the next one with the same peer began before it looked."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
import trio
from links_anew import begin_anew

from asyncfabric.actors import Actor, ActorDied, Message, handles, open_node
from asyncfabric.control import LinkConfig, open_link

PATIENCE_S = 10.0


@pytest.fixture
def config(tmp_path: Path) -> LinkConfig:
    return LinkConfig(ipc_folder=str(tmp_path / "s"))


@pytest.mark.anyio
async def test_a_loss_is_reported_before_the_session_that_follows_it(config: LinkConfig) -> None:
    async with open_link("a", config=config) as a, open_link("b", config=config) as b, b.watch() as changes:
        await a.connect(b.address)
        with anyio.fail_after(PATIENCE_S):
            states = [(await changes.receive()).state]
            for _ in range(3):  # as often as they like: what was not seen is reported once
                begin_anew(a, b)
            states += [(await changes.receive()).state, (await changes.receive()).state]
        assert states == ["ready", "lost", "ready"]
        with pytest.raises(anyio.WouldBlock):
            changes.receive_nowait()


class Wait(Message[int]):
    """Answered never."""


class Waiter(Actor):
    def __init__(self, begun: trio.Event) -> None:
        self.begun = begun

    @handles(Wait)
    async def wait(self, message: Wait) -> int:
        self.begun.set()
        await trio.sleep_forever()
        raise AssertionError


@pytest.mark.trio
async def test_who_asked_in_a_session_that_ended_is_informed(config: LinkConfig) -> None:
    """The listener stood still while its peer lost it and came back: it waited for the answer for ever."""
    async with open_link("a", config=config) as a, open_link("b", config=config) as b:
        await a.connect(b.address)
        async with open_node("a", a) as far, open_node("b", b) as near, trio.open_nursery() as nursery:
            begun, reported = trio.Event(), trio.Event()
            await far.spawn(Waiter, begun, name="waiter")
            waiter = await near.lookup(far.identity, "waiter")

            async def ask() -> None:
                with pytest.raises(ActorDied, match="was lost"):
                    await waiter.ask(Wait())
                reported.set()

            nursery.start_soon(ask)
            await begun.wait()
            begin_anew(a, b)
            with trio.move_on_after(PATIENCE_S):
                await reported.wait()
            nursery.cancel_scope.cancel()
        assert reported.is_set()
