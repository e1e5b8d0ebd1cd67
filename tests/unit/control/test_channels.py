"""The guarantees of a Channel, one suite for every carrier: order, at most once, losses, pressure, cancellation."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from random import Random

import pytest
import trio
from channel_worlds import BAD, KINDS, Channel, Note, World, in_world

from asyncfabric.control import PeerFound, PeerLost
from asyncfabric.errors import ClosedError, PeerError

pytestmark = [pytest.mark.parametrize("kind", KINDS), pytest.mark.slow]


async def found(channel: Channel, *peers: str) -> None:
    """Receive until these peers are found; nothing else may come before."""
    missing = set(peers)
    while missing:
        peer, event = await channel.receive()
        assert isinstance(event, PeerFound), (peer, event)
        missing.discard(peer)


async def following(channel: Channel) -> tuple[str, object]:
    """Receive what comes next, beside peers that are found."""
    while True:
        peer, event = await channel.receive()
        if not isinstance(event, PeerFound):
            return peer, event


async def notes(channel: Channel, count: int) -> list[tuple[str, int]]:
    """Receive so many messages; peers found in between are left out."""
    came: list[tuple[str, int]] = []
    while len(came) < count:
        peer, event = await following(channel)
        assert isinstance(event, Note), (peer, event)
        came.append((peer, event.number))
    return came


@pytest.mark.parametrize("seed", range(3))
def test_each_sender_is_received_in_order_and_each_message_once(kind: str, seed: int, tmp_path: Path) -> None:
    """CH-1, CH-2: members send to each other at the same time, short and long; each takes one by one or in batches."""
    random = Random(seed)
    lengths = {name: [random.choice((0, 5, 8000, 9000, 700_000)) for _ in range(25)] for name in "abc"}
    room = random.choice((1, 3, 64))

    async def test(world: World) -> None:
        channels = {name: await world.open(name) for name in "abc"}
        came: dict[tuple[str, str], list[Note]] = defaultdict(list)

        async def send(name: str, to: str, ready: trio.Event) -> None:
            await ready.wait()
            for number, length in enumerate(lengths[name]):
                await channels[name].send(to, Note(number, bytes([number]) * length))

        async def receive(name: str, nursery: trio.Nursery) -> None:
            ready = {other: trio.Event() for other in "abc" if other != name}
            for other, event in ready.items():
                nursery.start_soon(send, name, other, event)
            left = 50
            while left:
                batch = [await channels[name].receive(), *channels[name].take_nowait()]
                for peer, event in batch:
                    if isinstance(event, PeerFound):
                        ready[peer].set()
                    else:
                        assert isinstance(event, Note), event
                        came[peer, name].append(event)
                        left -= 1

        async with trio.open_nursery() as nursery:
            for name in "abc":
                nursery.start_soon(receive, name, nursery)
        for (source, _), messages in came.items():
            wanted = [Note(number, bytes([number]) * length) for number, length in enumerate(lengths[source])]
            assert messages == wanted

    in_world(kind, tmp_path, test, room)


def test_a_member_that_closes_is_lost_once_after_its_last_message(kind: str, tmp_path: Path) -> None:
    """CH-3."""

    async def test(world: World) -> None:
        a, b, c = [await world.open(name) for name in "abc"]
        await found(a, "b", "c")
        await found(b, "a", "c")
        await found(c, "a", "b")
        for number in range(20):
            await a.send("b", Note(number))
        await a.aclose()
        assert [await b.receive() for _ in range(20)] == [("a", Note(number)) for number in range(20)]
        peer, event = await b.receive()
        assert peer == "a"
        assert isinstance(event, PeerLost)
        with pytest.raises(PeerError):
            await b.send("a", Note(0))
        with pytest.raises(ClosedError):
            await a.send("b", Note(20))
        await b.send("c", Note(7))
        came = [await following(c), await following(c)]  # the loss of a may come before or after
        assert ("b", Note(7)) in came
        assert {type(event) for _, event in came} == {Note, PeerLost}
        await c.send("b", Note(8))
        assert await b.receive() == ("c", Note(8)), "the loss was reported twice, or a message came after it"

    in_world(kind, tmp_path, test)


def test_a_node_that_ends_without_a_word_is_lost_once(kind: str, tmp_path: Path) -> None:
    """CH-3: what it sent before is received first, as far as it came."""

    async def test(world: World) -> None:
        _, b, c = [await world.open(name) for name in "abc"]
        await found(b, "a", "c")
        await found(c, "a", "b")
        await world.kill("a")
        with trio.fail_after(20):
            peer, event = await following(b)
        assert peer == "a"
        assert isinstance(event, PeerLost)
        assert event.reason
        await c.send("b", Note(1))
        assert await b.receive() == ("c", Note(1))

    in_world(kind, tmp_path, test)


def test_a_sender_waits_while_the_window_is_full(kind: str, tmp_path: Path) -> None:
    """CH-4: who does not receive holds `window` messages of each sender, and stops nobody else for ever."""

    async def test(world: World) -> None:
        a, b = [await world.open(name) for name in "ab"]
        await found(a, "b")
        await found(b, "a")
        most = 40 if kind == "link" else 4  # a link has a window of its own, in bytes, before the member's
        sent: list[int] = []
        full = trio.Event()

        async def send() -> None:
            for number in range(40):
                await a.send("b", Note(number))
                sent.append(number)
                if len(sent) == most:
                    full.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            await full.wait()
            await trio.sleep(0.1)  # long enough for one too many
            assert len(sent) == most
            assert b.untaken("a") <= 4
            assert await notes(b, 40) == [("a", number) for number in range(40)]

    in_world(kind, tmp_path, test, window=4)


def test_a_cancelled_send_leaves_whole_or_not_at_all(kind: str, tmp_path: Path) -> None:
    """What is received is a subsequence of what was sent, in order; what returned is in it."""

    async def test(world: World) -> None:
        a, b = [await world.open(name) for name in "ab"]
        await found(a, "b")
        await found(b, "a")
        random, done = Random(7), trio.Event()
        returned: list[int] = []

        async def send() -> None:
            for number in range(60):
                with trio.move_on_after(random.choice((0, 0, 0.001, 0.003, 1))):
                    await a.send("b", Note(number, bytes(random.choice((1, 30_000)))))
                    returned.append(number)
            await a.send("b", Note(1000))
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            came: list[int] = []
            while not came or came[-1] != 1000:
                await trio.sleep(random.choice((0, 0.001)))
                came += [number for _, number in await notes(b, 1)]
            await done.wait()
        assert came == sorted(set(came))
        assert set(returned) <= set(came)

    in_world(kind, tmp_path, test, window=2)


def test_a_cancelled_receive_loses_nothing(kind: str, tmp_path: Path) -> None:
    async def test(world: World) -> None:
        a, b = [await world.open(name) for name in "ab"]
        await found(a, "b")
        await found(b, "a")
        came: list[Note] = []

        async def send() -> None:
            for number in range(50):
                await a.send("b", Note(number))
                await trio.sleep(0.001)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            while len(came) < 50:
                with trio.move_on_after(0.0015):
                    _, event = await following(b)
                    assert isinstance(event, Note)
                    came.append(event)
        assert came == [Note(number) for number in range(50)]

    in_world(kind, tmp_path, test)


def test_a_message_that_is_none_is_dropped_and_counted(kind: str, tmp_path: Path) -> None:
    """The window gets its place back."""

    async def test(world: World) -> None:
        a, b = [await world.open(name) for name in "ab"]
        await found(a, "b")
        await found(b, "a")
        for number in range(8):
            await a.send("b", BAD)
            await a.send("b", Note(number))
            assert await following(b) == ("a", Note(number))
        assert b.refused == 8
        with pytest.raises(PeerError, match="nobody"):
            await a.send("nobody", Note(1))

    in_world(kind, tmp_path, test, window=2)


def test_iteration_ends_when_the_channel_is_closed(kind: str, tmp_path: Path) -> None:
    async def test(world: World) -> None:
        a, b = [await world.open(name) for name in "ab"]
        await found(a, "b")
        came: list[object] = []
        received = trio.Event()

        async def iterate() -> None:
            async for _, event in b:
                came.append(event)
                if isinstance(event, Note):
                    received.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(iterate)
            await a.send("b", Note(1))
            await received.wait()
            await b.aclose()
            await b.aclose()
        with pytest.raises(ClosedError):
            await b.receive()

    in_world(kind, tmp_path, test)
