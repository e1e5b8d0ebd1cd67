"""What one end of a channel holds to whatever its carrier does: losses once, no strangers, numbered pieces in order."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from channel_worlds import CODEC, Note
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncfabric as af
from asyncfabric.control import FabricChannels, LocalChannels, PeerFound, PeerLost
from asyncfabric.errors import PeerError


def test_a_peer_is_found_and_lost_once_and_a_stranger_is_not_received() -> None:
    channels = LocalChannels(CODEC)
    a, _ = channels.open("a"), channels.open("b")
    data = CODEC.encode(Note(1))
    for _ in range(2):
        a.find("b")
        a.put("b", data)
    a.put("stranger", data)
    for reason in ("first", "second"):
        a.lose("b", reason)
    a.put("b", data)
    found = [("b", PeerFound()), ("b", Note(1)), ("b", Note(1)), ("b", PeerLost("first"))]
    assert a.take_nowait() == found


class Mixed:
    """A fabric whose messages are kept until they are put into any order, some of them twice."""

    def __init__(self, incarnation: int) -> None:
        self.peer = SimpleNamespace(incarnation=incarnation)
        self.sent: list[bytes] = []
        self.arrived: list[Any] = []

    def messages(self) -> Any:
        return SimpleNamespace(take_nowait=lambda: [self.arrived.pop(0) for _ in range(len(self.arrived))])

    def send(self, peer: Any, payload: bytes) -> Any:
        self.sent.append(payload)
        return SimpleNamespace(ended=False)

    async def connect(self, address: Any) -> Any:
        return SimpleNamespace(incarnation=address.incarnation)

    async def wait_writable(self) -> None:
        await trio.lowlevel.checkpoint()

    def counter(self) -> Any:
        raise NotImplementedError


def sends(channel: Any, notes: list[Note]) -> Callable[[], Awaitable[None]]:
    async def send() -> None:
        for note in notes:
            await channel.send("b", note)

    return send


@settings(max_examples=50, deadline=None)
@given(random=st.randoms(use_true_random=False), lengths=st.lists(st.integers(0, 20_000), max_size=8))
def test_pieces_of_a_fabric_in_any_order_and_twice_make_the_messages_that_were_sent(
    random: Any, lengths: list[int]
) -> None:
    addresses = {name: SimpleNamespace(incarnation=number) for number, name in enumerate("abc")}
    here, there = Mixed(0), Mixed(0)
    notes = [Note(number, bytes([number]) * length) for number, length in enumerate(lengths)]
    trio.run(sends(FabricChannels(here, CODEC, addresses).open("a"), notes))
    pieces = [*here.sent, *random.sample(here.sent, len(here.sent) // 2)]
    random.shuffle(pieces)
    there.arrived = [SimpleNamespace(peer=there.peer, payload=each) for each in pieces]
    b = FabricChannels(there, CODEC, addresses).open("b")
    assert [event for peer, event in b.take_nowait() if peer == "a"] == [PeerFound(), *notes]


def test_a_piece_that_could_not_leave_ends_the_session_of_its_peer_and_no_other_send() -> None:
    """A hole in the numbers of one recipient would stop it for ever; another one has nothing to do with it."""
    addresses = {name: SimpleNamespace(incarnation=number) for number, name in enumerate("abc")}

    class Failing(Mixed):
        def send(self, peer: Any, payload: bytes) -> Any:
            def result() -> None:
                if peer.incarnation == 1:
                    raise PeerError("it died")

            return SimpleNamespace(ended=True, result=result)

    a = FabricChannels(Failing(0), CODEC, addresses).open("a")

    async def send() -> None:
        await a.send("b", Note(1))
        await a.send("c", Note(2))
        with pytest.raises(PeerError, match="no session with b: it died"):
            await a.send("b", Note(3))

    trio.run(send)
    assert a.take_nowait() == [("b", PeerFound()), ("c", PeerFound()), ("b", PeerLost("it died"))]


@pytest.mark.parametrize("reads", ["run", "the sender itself"])
@pytest.mark.trio
async def test_who_waits_finds_what_another_call_took_for_it(reads: str) -> None:
    """`take_nowait` takes the report that a sender waits for; nothing more comes that would wake it."""
    config = af.FabricConfig(rails=("local",))
    async with af.open_fabric(config) as one, af.open_fabric(config) as other, trio.open_nursery() as nursery:
        addresses = {"a": one.address, "b": other.address}
        here = FabricChannels(one, CODEC, addresses, window=1)
        a, b = here.open("a"), FabricChannels(other, CODEC, addresses, window=1).open("b")
        if reads == "run":
            nursery.start_soon(here.run)
        await a.send("b", Note(1))
        waiting = trio.Event()

        async def send() -> None:
            waiting.set()
            await a.send("b", Note(2))

        nursery.start_soon(send)
        await waiting.wait()
        with trio.fail_after(10):
            await trio.testing.wait_all_tasks_blocked(0.05)
            while (await b.receive())[1] != Note(1):
                pass
            until = time.monotonic() + 0.2
            while time.monotonic() < until:  # the loop stands still, so that nobody else reads
                a.take_nowait()
            assert await b.receive() == ("a", Note(2))
        nursery.cancel_scope.cancel()


def test_a_piece_from_another_fabric_than_its_sources_is_dropped() -> None:
    addresses = {name: SimpleNamespace(incarnation=number) for number, name in enumerate("abc")}
    here, there = Mixed(0), Mixed(2)
    trio.run(sends(FabricChannels(here, CODEC, addresses).open("a"), [Note(1)]))
    there.arrived = [SimpleNamespace(peer=there.peer, payload=each) for each in here.sent]
    b = FabricChannels(there, CODEC, addresses).open("b")
    assert [event for peer, event in b.take_nowait() if peer == "a"] == [PeerFound()]


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_without_room_is_refused(window: int) -> None:
    with pytest.raises(ValueError, match="window must be at least 1"):
        LocalChannels(CODEC, window=window)
