"""LinkChannels over real links: peers are found before their messages, and no message crosses a session."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from asyncfabric.control import (
    DirectoryClient,
    Link,
    LinkChannels,
    LinkConfig,
    MemberChannel,
    PeerFound,
    PeerLost,
    open_link,
    serve_directory,
)
from asyncfabric.control.channels.link import MembersHere, MessagePart
from asyncfabric.errors import ClosedError, PeerError
from asyncfabric.weights.messages import Commit, Written
from asyncfabric.weights.update import WEIGHT_CODEC

CHANNEL = "weights"
ROLES = ("node",)
PATIENCE_S = 60.0


@dataclass
class Place:
    """A node in a task of its own, so that nodes end in any order."""

    link: Link
    channels: LinkChannels[Any]
    boxes: dict[str, MemberChannel[Any]]
    stop: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)

    async def end(self) -> None:
        self.stop.set()
        await self.ended.wait()


class Town:
    """Nodes of this process; each has a link, a post and participants."""

    def __init__(self, folder: Path, directory: str, nursery: trio.Nursery) -> None:
        self.folder, self.directory, self.nursery = folder, directory, nursery

    async def open(self, name: str, *participants: str) -> Place:
        return await self.nursery.start(self._live, name, participants)

    async def _live(self, name: str, participants: tuple[str, ...], *, task_status: Any) -> None:
        async with (
            open_link(name, config=LinkConfig(ipc_folder=str(self.folder))) as link,
            DirectoryClient(link, self.directory) as client,
            trio.open_nursery() as nursery,
        ):
            channels = LinkChannels(link, WEIGHT_CODEC, channel=CHANNEL)
            place = Place(link, channels, {one: channels.open(one) for one in participants})
            nursery.start_soon(channels.run, client, ROLES)
            await client.register("node", link.address, {})
            task_status.started(place)
            await place.stop.wait()
            nursery.cancel_scope.cancel()
        place.ended.set()


@asynccontextmanager
async def town(folder: Path) -> AsyncIterator[Town]:
    config = LinkConfig(ipc_folder=str(folder))
    with trio.fail_after(PATIENCE_S):
        async with open_link("directory", config=config) as link, serve_directory(link), trio.open_nursery() as nursery:
            yield Town(folder, link.address, nursery)
            nursery.cancel_scope.cancel()


def in_town(folder: Path, scenario: Callable[[Town], Awaitable[None]]) -> None:
    async def main() -> None:
        async with town(folder) as made:
            await scenario(made)

    trio.run(main)


async def until(box: MemberChannel[Any], source: str, kind: type) -> list[Any]:
    """Return what comes from a participant, up to the first of a kind."""
    found: list[Any] = []
    while True:
        name, event = await box.receive()
        if name == source:
            found.append(event)
            if isinstance(event, kind):
                return found


def test_sessions_are_reported_before_their_words_on_both_sides(tmp_path: Path) -> None:
    async def scenario(made: Town) -> None:
        a, b = await made.open("a", "trainer-0"), await made.open("b", "r/0", "r/1")
        mine = a.boxes["trainer-0"]
        assert await until(mine, "r/0", PeerFound) == [PeerFound()]
        for number in range(5):
            await mine.send("r/1", Commit(number))
        assert await until(b.boxes["r/1"], "trainer-0", PeerFound) == [PeerFound()]
        for number in range(5):
            assert await b.boxes["r/1"].receive() == ("trainer-0", Commit(number))
        assert await until(b.boxes["r/0"], "trainer-0", PeerFound) == [PeerFound()], (
            "each participant learns of the session"
        )
        assert a.channels.known == {"r/0": "b", "r/1": "b"}
        with pytest.raises(PeerError, match="no session with r/7"):
            await mine.send("r/7", Commit(1))
        for place in (a, b):
            await place.end()
        with pytest.raises(ClosedError):
            while True:
                await mine.receive()

    in_town(tmp_path, scenario)


def test_long_messages_come_whole_between_short_ones(tmp_path: Path) -> None:
    long = Written(3, bytes(range(256)) * 4000, b"\x07" * 900_000)

    async def scenario(made: Town) -> None:
        a, b = await made.open("a", "x", "y"), await made.open("b", "z")
        for name in ("x", "y"):
            await until(a.boxes[name], "z", PeerFound)

        async def send(name: str) -> None:
            for number in range(3):
                await a.boxes[name].send("z", long)
                await a.boxes[name].send("z", Commit(number))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, "x")
            nursery.start_soon(send, "y")
            came: dict[str, list[Any]] = {"x": [], "y": []}
            while sum(map(len, came.values())) < 12:
                name, event = await b.boxes["z"].receive()
                if event != PeerFound():
                    came[name].append(event)
        wanted = [long, Commit(0), long, Commit(1), long, Commit(2)]
        assert came == {"x": wanted, "y": wanted}
        for place in (a, b):
            await place.end()

    in_town(tmp_path, scenario)


def test_a_death_is_reported_and_a_new_life_is_another_session(tmp_path: Path) -> None:
    async def scenario(made: Town) -> None:
        a, b = await made.open("a", "trainer-0"), await made.open("b", "r/0")
        mine = a.boxes["trainer-0"]
        await until(mine, "r/0", PeerFound)
        await b.end()
        (lost,) = await until(mine, "r/0", PeerLost)
        assert lost.reason.endswith(" (it was on node b)"), "whoever looks for a rank must know where"
        with pytest.raises(PeerError):
            await mine.send("r/0", Commit(1))
        again = await made.open("b", "r/0")
        assert await until(mine, "r/0", PeerFound) == [PeerFound()]
        await mine.send("r/0", Commit(2))
        assert await until(again.boxes["r/0"], "trainer-0", Commit) == [PeerFound(), Commit(2)]
        for place in (a, again):
            await place.end()

    in_town(tmp_path, scenario)


def test_a_broken_session_is_lost_and_found_by_both_and_old_words_are_dropped(tmp_path: Path) -> None:
    async def scenario(made: Town) -> None:
        a, b = await made.open("a", "trainer-0"), await made.open("b", "r/0")
        mine, theirs = a.boxes["trainer-0"], b.boxes["r/0"]
        await until(mine, "r/0", PeerFound)
        await until(theirs, "trainer-0", PeerFound)
        old = a.channels._sessions[b.link.identity].mine
        await a.link.disconnect(b.link.identity)  # both live on, and dial again
        assert isinstance((await until(mine, "r/0", PeerFound))[0], PeerLost)
        assert isinstance((await until(theirs, "trainer-0", PeerFound))[0], PeerLost)
        late = MessagePart(old, "trainer-0", "r/0", True, msgspec.msgpack.encode(Commit(7)))
        await a.link.send(b.link.identity, CHANNEL, msgspec.msgpack.encode(late))
        await a.link.send(b.link.identity, CHANNEL, b"\xc1 no message")  # logged, and nobody is harmed
        await mine.send("r/0", Commit(8))
        assert await theirs.receive() == ("trainer-0", Commit(8)), "what was sent before is not received"
        for place in (a, b):
            await place.end()

    in_town(tmp_path, scenario)


def test_a_beginning_whose_loss_nobody_noticed_is_reported_as_both(tmp_path: Path) -> None:
    async def scenario(made: Town) -> None:
        a, b = await made.open("a", "trainer-0"), await made.open("b", "r/0")
        mine = a.boxes["trainer-0"]
        await until(mine, "r/0", PeerFound)
        here = MembersHere(
            b.channels._sessions[a.link.identity].mine + 2, a.channels._sessions[b.link.identity].mine, ["r/0", "r/1"]
        )
        await b.link.send(a.link.identity, CHANNEL, msgspec.msgpack.encode(here))
        assert await until(mine, "r/0", PeerFound) == [
            PeerLost("it began a new session (it was on node b)"),
            PeerFound(),
        ]
        assert await until(mine, "r/1", PeerFound) == [PeerFound()]
        for place in (a, b):
            await place.end()

    in_town(tmp_path, scenario)
