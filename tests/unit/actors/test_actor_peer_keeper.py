"""Keeping peers: connecting with back-off, incarnations, broken and lost peers, following the membership."""

from __future__ import annotations

import pytest
import trio
import trio.testing

import asyncfabric as af
from asyncfabric.actors import Identity
from asyncfabric.actors.membership import Gone, Joined, Member, Membership
from asyncfabric.actors.peer_keeper import PeerFabric, open_peer_keeper
from asyncfabric.errors import PeerError

pytestmark = pytest.mark.trio
A1, A2 = Identity("a", 1), Identity("a", 2)


class Switchboard:
    """A fabric whose peers can be reached when the test allows it."""

    def __init__(self) -> None:
        self.reachable: set[bytes] = set()
        self.log: list[str] = []
        self.times: list[float] = []

    async def connect(self, address: bytes, /) -> str:
        await trio.lowlevel.checkpoint()
        self.times.append(trio.current_time())
        if not address:
            raise ValueError("a fabric address has 17..4112 bytes, got 0")  # as asyncfabric.Fabric does
        if address not in self.reachable:
            raise PeerError(f"nobody at {address!r}")
        self.log.append(f"connect {address.decode()}")
        return address.decode()

    async def disconnect(self, peer: str, /) -> None:
        await trio.lowlevel.checkpoint()
        self.log.append(f"disconnect {peer}")


def accepts_a_fabric(fabric: af.Fabric) -> PeerFabric[af.Peer]:
    return fabric  # the type checker compares


async def test_connecting_backs_off_until_it_works(autojump_clock: trio.testing.MockClock) -> None:
    fabric = Switchboard()
    async with open_peer_keeper(fabric, jitter=lambda: 1.0) as keeper:
        keeper.join(A1, b"a1")
        await trio.sleep(60)
        pauses = [later - earlier for earlier, later in zip(fabric.times, fabric.times[1:], strict=False)]
        assert pauses[:8] == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0])
        assert pauses[8:] == pytest.approx([5.0] * len(pauses[8:]))
        assert keeper.peer(A1) is None
        fabric.reachable.add(b"a1")
        assert await keeper.wait_peer(A1) == "a1"
    assert fabric.log == ["connect a1", "disconnect a1"]


async def test_an_address_that_is_none_is_reported_to_who_waits_and_keeps_the_others() -> None:
    fabric = Switchboard()
    fabric.reachable.add(b"a2")
    async with open_peer_keeper(fabric) as keeper:
        keeper.join(Identity("junk", 1), b"")
        with pytest.raises(PeerError, match="junk has no address that can be read"):
            await keeper.wait_peer(Identity("junk", 1))
        keeper.join(A2, b"a2")
        assert await keeper.wait_peer(A2) == "a2"
        keeper.join(Identity("junk", 1), b"a2")
        assert await keeper.wait_peer(Identity("junk", 1)) == "a2"


async def test_a_new_incarnation_is_a_new_peer(autojump_clock: trio.testing.MockClock) -> None:
    fabric = Switchboard()
    fabric.reachable |= {b"a1", b"a2"}
    async with open_peer_keeper(fabric) as keeper:
        keeper.join(A1, b"a1")
        assert await keeper.wait_peer(A1) == "a1"
        keeper.join(A1, b"a1")
        keeper.join(A2, b"a2")
        assert await keeper.wait_peer(A2) == "a2"
        assert keeper.kept == (A2,)
        assert keeper.peer(A1) is None
        with pytest.raises(PeerError, match="not a known node"):
            await keeper.wait_peer(A1)
    assert sorted(fabric.log) == ["connect a1", "connect a2", "disconnect a1", "disconnect a2"]


async def test_who_waits_for_a_peer_that_leaves_learns_of_it() -> None:
    fabric = Switchboard()

    async def wait() -> None:
        with pytest.raises(PeerError, match="left or was lost"):
            await keeper.wait_peer(A1)

    async with open_peer_keeper(fabric) as keeper:
        keeper.join(A1, b"a1")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            keeper.leave(A1)
        keeper.leave(A1)


async def test_a_broken_peer_is_connected_again(autojump_clock: trio.testing.MockClock) -> None:
    fabric = Switchboard()
    fabric.reachable.add(b"a1")
    async with open_peer_keeper(fabric) as keeper:
        keeper.join(A1, b"a1")
        await keeper.wait_peer(A1)
        keeper.report_broken(A1)
        keeper.report_broken(A1)
        assert keeper.peer(A1) is None
        assert await keeper.wait_peer(A1) == "a1"
    assert fabric.log == ["connect a1", "disconnect a1"] * 2


async def test_members_are_followed(autojump_clock: trio.testing.MockClock) -> None:
    fabric = Switchboard()
    fabric.reachable |= {b"a1", b"b"}
    view = Membership()
    view.apply(Joined(Member(A1, "decode", fabric_address=b"a1")))
    view.apply(Joined(Member(Identity("r", 1), "router")))
    async with open_peer_keeper(fabric) as keeper, trio.open_nursery() as nursery:
        nursery.start_soon(keeper.follow, view)
        await trio.testing.wait_all_tasks_blocked()
        assert keeper.peer(A1) == "a1"
        view.apply(Joined(Member(Identity("b", 1), "decode", fabric_address=b"b")))
        view.apply(Gone(A1))
        await trio.testing.wait_all_tasks_blocked()
        assert keeper.kept == (Identity("b", 1),)
        assert fabric.log == ["connect a1", "connect b", "disconnect a1"] or fabric.log[1:] == [
            "disconnect a1",
            "connect b",
        ]
        nursery.cancel_scope.cancel()


async def test_an_error_of_the_body_rises_as_it_is() -> None:
    with pytest.raises(KeyError):
        async with open_peer_keeper(Switchboard()) as keeper:
            keeper.join(A1, b"a1")
            raise KeyError("mine")
