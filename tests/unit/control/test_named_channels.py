"""FabricChannels whose members are named by their address: sessions with strangers, and one for each connection."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import trio
from channel_worlds import CODEC, Channel, Note
from fabrics import open_fake

import asyncfabric as af
from asyncfabric.control import FabricChannels, PeerFound, PeerLost
from asyncfabric.control.channels import pieces
from asyncfabric.errors import ClosedError, PeerError
from asyncfabric.testing import FakeNetwork

pytestmark = pytest.mark.slow

CONFIG = af.FabricConfig(rails=("local",), peer_deadline_host=2.0)


@dataclass
class Node:
    """A fabric and its member."""

    fabric: af.Fabric
    channels: FabricChannels[Note]
    channel: Channel

    @property
    def name(self) -> str:
        return self.channel.name


@asynccontextmanager
async def node(
    nursery: trio.Nursery, window: int = 64, opening: Callable[[], Any] = lambda: af.open_fabric(CONFIG)
) -> AsyncIterator[Node]:
    """Open a fabric and its member, whose losses are noticed."""
    async with opening() as fabric:
        channels = FabricChannels(fabric, CODEC, af.FabricAddress.parse, window=window)

        async def run() -> None:
            with suppress(ClosedError):
                await channels.run()

        channel = channels.open(str(fabric.address))
        nursery.start_soon(run)
        yield Node(fabric, channels, channel)


@asynccontextmanager
async def nodes(count: int, window: int = 64) -> AsyncIterator[list[Node]]:
    """Open so many, for at most half a minute."""
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
            yield [await stack.enter_async_context(node(nursery, window)) for _ in range(count)]
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("engine", ["fake", "native"])
@pytest.mark.trio
async def test_whoever_sends_is_found_and_can_be_answered(engine: str) -> None:
    network = FakeNetwork()
    opening: Any = (lambda: open_fake(network)) if engine == "fake" else (lambda: af.open_fabric(CONFIG))
    with trio.fail_after(30):
        async with (
            trio.open_nursery() as nursery,
            node(nursery, opening=opening) as one,
            node(nursery, opening=opening) as other,
        ):
            await one.channel.send(other.name, Note(1))
            assert await one.channel.receive() == (other.name, PeerFound())
            assert [await other.channel.receive() for _ in range(2)] == [(one.name, PeerFound()), (one.name, Note(1))]
            await other.channel.send(one.name, Note(2, bytes(20_000)))
            assert await one.channel.receive() == (other.name, Note(2, bytes(20_000)))
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("window", [1, 3, 64])
@pytest.mark.trio
async def test_each_sender_is_received_in_order_and_each_message_once(window: int) -> None:
    """CH-1, CH-2, CH-4: all send to all at the same time, long messages and short ones."""
    random = Random(window)
    lengths = [random.choice((0, 5, 8000, 9000, 100_000)) for _ in range(30)]
    async with nodes(3, window) as three:
        came: dict[tuple[str, str], list[Note]] = defaultdict(list)

        async def send(one: Node, to: Node) -> None:
            for number, length in enumerate(lengths):
                await one.channel.send(to.name, Note(number, bytes([number]) * length))

        async def receive(one: Node) -> None:
            while sum(len(notes) for (_, to), notes in came.items() if to == one.name) < 2 * len(lengths):
                source, event = await one.channel.receive()
                if isinstance(event, Note):
                    came[source, one.name].append(event)

        async with trio.open_nursery() as nursery:
            for one in three:
                nursery.start_soon(receive, one)
                for to in three:
                    if to is not one:
                        nursery.start_soon(send, one, to)
        wanted = [Note(number, bytes([number]) * length) for number, length in enumerate(lengths)]
        assert len(came) == 6
        assert all(notes == wanted for notes in came.values())


@pytest.mark.trio
async def test_a_member_that_closes_is_lost_after_its_last_message() -> None:
    """CH-3."""
    async with nodes(2) as (one, other):
        for number in range(5):
            await one.channel.send(other.name, Note(number))
        await one.channel.aclose()
        events = [await other.channel.receive() for _ in range(7)]
        assert events == [
            (one.name, PeerFound()),
            *((one.name, Note(number)) for number in range(5)),
            (one.name, PeerLost("it was closed")),
        ]
        assert other.channels.names == (other.name,)


@pytest.mark.trio
async def test_after_a_connection_ended_both_begin_a_new_session() -> None:
    """What is sent then arrives, in both directions; each side is lost once and found once more."""
    async with nodes(2) as (one, other):
        for round_number in range(4):
            await one.channel.send(other.name, Note(round_number))
            await other.channel.send(one.name, Note(round_number))
            for end, peer in ((one, other), (other, one)):
                events: list[Any] = []
                while not events or not isinstance(events[-1], Note):
                    events.append((await end.channel.receive())[1])
                lost = events.pop(0) if round_number else None
                assert lost is None or isinstance(lost, PeerLost)
                assert events == [PeerFound(), Note(round_number)]
                assert set(end.channels.names) == {end.name, peer.name}
            breaks = (one, other)[round_number % 2]
            peer = breaks.channels._sessions.peers[(other, one)[round_number % 2].name]
            await breaks.fabric.disconnect(peer)


@pytest.mark.trio
async def test_nothing_is_kept_of_members_that_come_and_go() -> None:
    async with nodes(1) as (home,), trio.open_nursery() as nursery:
        for number in range(20):
            async with node(nursery) as guest:
                await guest.channel.send(home.name, Note(number))
                assert await home.channel.receive() == (guest.name, PeerFound())
                assert await home.channel.receive() == (guest.name, Note(number))
                await home.channel.send(guest.name, Note(number))
            assert isinstance((await home.channel.receive())[1], PeerLost)
            with pytest.raises(PeerError):
                await home.channel.send(guest.name, Note(number))
        channels = home.channels
        assert channels.names == (home.name,)
        kept = (channels._sessions.peers, channels._outgoing, channels._incoming, channels._owed, home.channel._turns)
        assert not any(kept[:4]), kept
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_message_in_the_name_of_another_fabric_is_not_received() -> None:
    async with nodes(3) as (one, other, liar):
        for name in (one.name, "nobody", other.name):
            piece = pieces.MessagePiece(name, "", pieces.LAST, 0, CODEC.encode(Note(666)))
            await liar.fabric.send(await liar.fabric.connect(other.fabric.address), pieces.encode_piece(piece))
        await one.channel.send(other.name, Note(1))
        await liar.channel.send(other.name, Note(2))
        events = {await other.channel.receive() for _ in range(4)}
        assert events == {
            (one.name, PeerFound()),
            (one.name, Note(1)),
            (liar.name, PeerFound()),
            (liar.name, Note(2)),
        }


@pytest.mark.trio
async def test_a_sender_that_minds_no_window_is_lost() -> None:
    """CH-4: a recipient keeps as much as its window has room for, and what is not whole is bounded too."""
    async with nodes(2, window=4) as (home, rude):
        peer = await rude.fabric.connect(home.fabric.address)
        for number in range(20):
            piece = pieces.MessagePiece(rude.name, "", pieces.LAST, number, CODEC.encode(Note(number)))
            await rude.fabric.send(peer, pieces.encode_piece(piece))
        while not any(isinstance(event, PeerLost) for _, event in home.channel._items):
            await home.channels._changed.wait()
        await rude.fabric.send(peer, pieces.encode_piece(piece))
        events = [event for _, event in home.channel.take_nowait()]
        lost = PeerLost("it sent more than its window has room for")
        assert events == [PeerFound(), *map(Note, range(5)), lost]


def test_a_stream_that_never_makes_a_message_overruns() -> None:
    for ahead in (0, 1):
        stream, data = pieces.PieceStream(), bytes(8000)
        for number in range(ahead, 2 * pieces.MAX_MESSAGE_BYTES // len(data) + ahead + 1):
            for found in stream.in_order(pieces.MessagePiece("a", "", pieces.PART, number, data)):
                assert stream.whole(found) is None
        assert stream.overrun


@pytest.mark.trio
async def test_bad_names_and_messages_are_refused_at_the_call() -> None:
    async with nodes(2) as (one, other):
        with pytest.raises(PeerError, match="it is the sender"):
            await one.channel.send(one.name, Note(1))
        with pytest.raises(PeerError, match="nobody"):
            await one.channel.send("nobody", Note(1))
        with pytest.raises(ValueError, match="at most 67108864 are carried"):
            await one.channel.send(other.name, Note(1, bytes(pieces.MAX_MESSAGE_BYTES)))
        with pytest.raises(ValueError, match="has one member"):
            one.channels.open(one.name)
        with pytest.raises(ValueError, match="not the address of this fabric"):
            FabricChannels(one.fabric, CODEC, af.FabricAddress.parse).open(other.name)
