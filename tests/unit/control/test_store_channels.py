"""Channels over a store: with and without fabrics, and what threads inside the store they leave behind."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import anyio
import pytest

distributed = pytest.importorskip("torch.distributed", reason="stores need torch")

import asyncfabric as af  # noqa: E402
from asyncfabric.control import Codec, MemberChannel, PeerFound, PeerLost, StoreChannels  # noqa: E402
from asyncfabric.control.channels.store import SETTLE_S  # noqa: E402
from asyncfabric.control.channels.store_calls import connected_apart  # noqa: E402

CODEC: Codec[bytes] = Codec(bytes, bytes)


class SlowStore:
    """A store far away: each call takes a while, the first of them lets a test go on; `inside` counts who is in it."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.inside = 0
        self.entered = threading.Event()
        self._store = distributed.HashStore()

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            self.inside += 1
            self.entered.set()
            time.sleep(self.delay_s)
            try:
                return real(*arguments)
            finally:
                self.inside -= 1

        return call


async def cancel_in_a_call(store: SlowStore) -> float:
    """Cancel `run` while a thread is in the store; return how long that took."""
    channels = StoreChannels(store, CODEC)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(channels.run)
        await anyio.to_thread.run_sync(store.entered.wait, 10.0)
        tasks.cancel_scope.cancel()
        began = anyio.current_time()
    return anyio.current_time() - began


class WrittenKeys:
    """A store that keeps the keys that were written."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self._store = distributed.HashStore()

    @property
    def messages(self) -> list[str]:
        """Return the keys of messages."""
        return [key for key in self.keys if "/message/" in key]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: str | bytes) -> None:
        self.keys.append(key)
        self._store.set(key, value)


@pytest.mark.anyio
async def test_members_of_one_process_need_no_store_for_their_messages() -> None:
    store = WrittenKeys()
    channels = StoreChannels(store, CODEC, window=3)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            one, other = await channels.open("one"), await channels.open("other")
            tasks.start_soon(channels.run)
            assert await one.receive() == ("other", PeerFound())
            for number in range(3):
                await one.send("other", b"%d" % number)
            with anyio.move_on_after(0.1) as full:
                await one.send("other", b"too many")
            assert full.cancelled_caught
            assert [await other.receive() for _ in range(3)] == [("one", PeerFound()), ("one", b"0"), ("one", b"1")]
            await one.send("other", b"3")
            assert [await other.receive() for _ in range(2)] == [("one", b"2"), ("one", b"3")]
            await other.send("one", b"4")
            assert await one.receive() == ("other", b"4")
            await one.aclose()
            assert isinstance((await other.receive())[1], PeerLost)
            tasks.cancel_scope.cancel()
    assert not store.messages


@asynccontextmanager
async def two_with_fabrics(
    store: WrittenKeys, window: int = 64
) -> AsyncIterator[tuple[list[af.Fabric], list[MemberChannel[bytes]]]]:
    """Members a and b, each with a fabric, that have found each other and answered: from now on they send over them.

    `window` is that of b.
    """
    config = af.FabricConfig(rails=("local",))
    with anyio.fail_after(30):
        async with af.open_fabric(config) as one, af.open_fabric(config) as other, anyio.create_task_group() as tasks:
            members = []
            for fabric, name, room in ((one, "a", 64), (other, "b", window)):
                channels = StoreChannels(store, CODEC, window=room)
                channels.use_fabric(fabric)
                members.append(await channels.open(name))
                tasks.start_soon(channels.run)
            a, b = members
            assert await a.receive() == ("b", PeerFound())
            assert await b.receive() == ("a", PeerFound())
            while True:
                store.keys.clear()
                await a.send("b", b"question")
                assert await b.receive() == ("a", b"question")
                await b.send("a", b"answer")
                assert await a.receive() == ("b", b"answer")
                if not store.messages:
                    break
            yield [one, other], members
            tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_messages_go_over_fabrics_and_what_was_sent_last_comes_before_the_loss() -> None:
    store = WrittenKeys()
    async with two_with_fabrics(store) as (_, (a, b)):
        for number in range(40):
            await a.send("b", b"%d" % number * 5000)
        await a.aclose()
        assert [await b.receive() for _ in range(40)] == [("a", b"%d" % number * 5000) for number in range(40)]
        assert isinstance((await b.receive())[1], PeerLost)
    assert not store.messages


class HeldBack:
    """The messages of a fabric, which can be held back: as where its worker gets no processor."""

    def __init__(self, stream: Any) -> None:
        self.released = anyio.Event()
        self.released.set()
        self._stream = stream

    def take_nowait(self) -> list[Any]:
        return self._stream.take_nowait() if self.released.is_set() else []

    def __aiter__(self) -> HeldBack:
        return self

    async def __anext__(self) -> Any:
        message = await self._stream.__anext__()
        await self.released.wait()
        return message


@pytest.mark.anyio
async def test_a_loss_waits_for_what_was_sent_before_and_is_still_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[HeldBack] = []
    real = af.Fabric.messages

    def messages(fabric: af.Fabric) -> Any:
        streams.append(HeldBack(real(fabric)))
        return streams[-1]

    monkeypatch.setattr(af.Fabric, "messages", messages)
    async with two_with_fabrics(WrittenKeys()) as (_, (a, b)):
        streams[1].released = anyio.Event()
        await a.send("b", b"the last")
        await a.aclose()
        with anyio.move_on_after(0.5) as early:
            assert not await b.receive(), "it left before its message came"
        assert early.cancelled_caught
        streams[1].released.set()
        assert await b.receive() == ("a", b"the last")
        assert isinstance((await b.receive())[1], PeerLost)


@pytest.mark.anyio
async def test_what_a_fabric_cannot_carry_comes_through_the_store_in_its_place() -> None:
    store = WrittenKeys()
    async with two_with_fabrics(store) as (fabrics, (a, b)):
        for number in range(20):
            await a.send("b", b"%d" % number * 5000)
            if number == 10:
                await fabrics[1].aclose()
        await a.aclose()
        assert [await b.receive() for _ in range(20)] == [("a", b"%d" % number * 5000) for number in range(20)]
        assert isinstance((await b.receive())[1], PeerLost)
    assert store.messages


def messages_at(fabric: af.Fabric) -> int:
    return fabric.statistics().counters["messages_received"]


@pytest.mark.anyio
async def test_who_sends_more_than_the_window_of_its_recipient_is_lost() -> None:
    store = WrittenKeys()
    async with two_with_fabrics(store, window=4) as (fabrics, (a, b)):
        before = messages_at(fabrics[1])
        for number in range(10):
            await a.send("b", b"%d" % number)
        while messages_at(fabrics[1]) < before + 10:  # noqa: ASYNC110  # what comes while b receives finds room
            await anyio.sleep(0.01)
        assert [await b.receive() for _ in range(5)] == [("a", b"%d" % number) for number in range(5)]
        assert isinstance((await b.receive())[1], PeerLost)


@pytest.mark.anyio
async def test_who_begins_anew_with_the_same_fabric_gets_messages_when_it_has_found_their_sender() -> None:
    store = WrittenKeys()
    async with two_with_fabrics(store) as (fabrics, (a, _)), anyio.create_task_group() as tasks:
        again = StoreChannels(store, CODEC)
        again.use_fabric(fabrics[1])
        b = await again.open("b")
        while not isinstance((await a.receive())[1], PeerFound):
            pass
        for number in range(5):
            await a.send("b", b"%d" % number)
        await anyio.sleep(0.1)  # what goes directly now would come before anybody is there
        tasks.start_soon(again.run)
        assert await b.receive() == ("a", PeerFound())
        assert [await b.receive() for _ in range(5)] == [("a", b"%d" % number) for number in range(5)]
        tasks.cancel_scope.cancel()


@pytest.fixture(scope="module")
def libuv() -> None:
    """Let the first store of the process leave the pipe that it keeps for good."""
    distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.anyio
@pytest.mark.usefixtures("libuv")
async def test_the_program_may_wait_for_a_key_over_its_own_connection() -> None:
    """A TCPStore answers one call of a connection at a time."""
    served = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    users = [distributed.TCPStore("127.0.0.1", served.port, is_master=False) for _ in range(2)]
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            both = [StoreChannels(connected_apart(user), CODEC) for user in users]
            one, other = [await channels.open(name) for channels, name in zip(both, "ab", strict=True)]
            for user, channels in zip(users, both, strict=True):
                tasks.start_soon(anyio.to_thread.run_sync, user.wait, ["both have answered"], timedelta(seconds=5))
                tasks.start_soon(channels.run)
            await one.receive(), await other.receive()
            for _ in range(3):
                await one.send("b", b"question")
                assert await other.receive() == ("a", b"question")
                await other.send("a", b"answer")
                assert await one.receive() == ("b", b"answer")
            served.set("both have answered", "")
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_who_cancels_waits_for_the_call_under_way(backend: str) -> None:
    """An interpreter that ends while a thread is inside torch aborts."""
    store = SlowStore(0.2)
    anyio.run(cancel_in_a_call, store, backend=backend)
    assert store.inside == 0


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_a_store_that_does_not_answer_is_left(backend: str) -> None:
    store = SlowStore(3 * SETTLE_S)
    assert anyio.run(cancel_in_a_call, store, backend=backend) < 2.5 * SETTLE_S
    assert store.inside == 1
