"""What the actors' layer needs of a link, checked on the fake one and on the real one: so the fake is no wish."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing
from actor_links import KINDS, Opener, link_opener

from asyncfabric.actors.link import Identity
from asyncfabric.errors import BusyError, PeerError

pytestmark = pytest.mark.trio


@pytest.fixture(params=KINDS)
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    return link_opener(str(request.param), tmp_path)


async def test_messages_arrive_in_order_also_those_from_before_the_listener(opener: Opener) -> None:
    async with opener("a") as a, opener("b") as b:
        peer = await a.connect(b.address)
        assert peer == b.identity
        for number in range(3):
            await a.send(peer, "words", b"%d" % number, "00-trace")
        async with b.listen("words") as arrivals:
            await a.send(peer, "words", b"3")
            for number in range(4):
                arrival = await arrivals.receive()
                assert (arrival.sender, arrival.body) == (a.identity, b"%d" % number)
                assert arrival.trace == ("00-trace" if number < 3 else None)
            await b.send(a.identity, "back", b"x")
            async with a.listen("back") as back:
                assert (await back.receive()).sender == b.identity


async def test_senders_wait_for_room_and_nothing_is_dropped(opener: Opener) -> None:
    body = bytes(200_000)
    sent = 0

    async def send() -> None:
        nonlocal sent
        for _ in range(40):
            await a.send(peer, "bulk", body)
            sent += 1

    async with opener("a") as a, opener("b") as b, trio.open_nursery() as nursery:
        peer = await a.connect(b.address)
        nursery.start_soon(send)
        while sent < 3:
            await trio.testing.wait_all_tasks_blocked()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert sent < 40
        async with b.listen("bulk") as arrivals:
            for _ in range(40):
                assert (await arrivals.receive()).body == body
        assert sent == 40


async def test_the_unknown_and_the_lost_are_peer_errors(opener: Opener) -> None:
    async with opener("a") as a:
        with pytest.raises(PeerError):
            await a.send(Identity("nobody", 1), "words", b"x")
        async with a.watch() as changes:
            async with opener("b") as b:
                peer = await a.connect(b.address)
                change = await changes.receive()
                assert (change.peer, change.state) == (peer, "ready")
                await a.send(peer, "words", b"x")
            while change.state != "lost":
                change = await changes.receive()
            assert change.peer == peer
            assert change.reason
            with pytest.raises(PeerError):
                await a.send(peer, "words", b"x")


async def test_disconnect_is_seen_on_both_sides(opener: Opener) -> None:
    async with opener("a") as a, opener("b") as b, a.watch() as at_a, b.watch() as at_b:
        peer = await a.connect(b.address)
        await a.disconnect(peer)
        for changes, whom in ((at_a, b), (at_b, a)):
            change = await changes.receive()
            while change.state != "lost":
                change = await changes.receive()
            assert change.peer == whom.identity


async def test_misuse_is_reported_at_the_call(opener: Opener) -> None:
    async with opener("a") as a, opener("b") as b:
        peer = await a.connect(b.address)
        with pytest.raises(TypeError, match="body must be bytes"):
            await a.send(peer, "words", bytearray(b"x"))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="body has"):
            await a.send(peer, "words", bytes(2 << 20))
        async with a.listen("words"):
            with pytest.raises(BusyError):
                async with a.listen("words"):
                    pass
