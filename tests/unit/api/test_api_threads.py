"""A fabric belongs to the event loop and the thread that opened it: other calls are refused and change nothing."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import pytest
from fabrics import Pair, open_fake, open_pair

import asyncfabric as af
from asyncfabric.testing import FakeEngine, FakeNetwork

pytestmark = pytest.mark.anyio

ELSEWHERE = r"{}\(\) is called from thread .*the thread that opened it.*nothing was changed"


async def awaited(value: Awaitable[Any]) -> None:
    await value


async def opened(word: af.WatchWord) -> None:
    async with word:
        pass


WAITS: dict[str, Callable[[Pair], Awaitable[Any]]] = {
    "aclose": lambda p: p.writer.aclose(),
    "release": lambda p: p.source.release(),
    "revoke": lambda p: p.source.revoke(),
    "allocate": lambda p: p.writer.allocate(64),
    "register": lambda p: p.writer.register(bytearray(64)),
    "connect": lambda p: p.writer.connect(p.reader.address),
    "warm": lambda p: p.writer.warm([p.reader.address]),
    "wait_writable": lambda p: p.writer.wait_writable(),
    "__anext__": lambda p: anext(p.reader.messages()),
    "__aenter__": lambda p: opened(p.writer.watch()),
}


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
@pytest.mark.parametrize("name", WAITS)
async def test_a_wait_in_another_loop_is_refused_and_changes_nothing(name: str, backend: str) -> None:
    async with open_pair() as p:
        before = p.writer.statistics()
        word = p.writer.watch() if name == "__aenter__" else None
        call = (lambda p: opened(word)) if word is not None else WAITS[name]  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match=ELSEWHERE.format(name)):
            await anyio.to_thread.run_sync(partial(anyio.run, call, p, backend=backend))
        assert not p.writer.closed and not p.source.released
        assert p.writer.statistics() == before
        assert p.writer.why() == p.reader.why() == []
        await p.writer.write(p.source[:8], p.key, 0)
        await p.source.release()


async def test_a_transfer_awaited_in_another_loop_goes_on() -> None:
    async with open_pair(hold=True) as p:
        transfer = p.writer.write(p.source[:8], p.key, 0)
        for wait in (transfer, af.wait_all([transfer])):
            for backend in ("trio", "asyncio"):
                with pytest.raises(RuntimeError, match="the thread that opened it"):
                    await anyio.to_thread.run_sync(partial(anyio.run, awaited, wait, backend=backend))
                wait = transfer  # a coroutine is awaited once
        p.network.release()
        assert (await transfer).bytes == 8


@pytest.mark.parametrize("later", ["trio", "asyncio"])
@pytest.mark.parametrize("first", ["trio", "asyncio"])
def test_a_later_loop_of_the_same_thread_is_another_one(first: str, later: str) -> None:
    """A fabric whose loop has ended is no other loop's."""
    engine, kept = FakeEngine(network=FakeNetwork()), list[af.Fabric]()

    async def leave_open() -> None:
        kept.append(await af.open_fabric(engine_factory=lambda config: engine).__aenter__())

    async def refused() -> None:
        with pytest.raises(RuntimeError, match=ELSEWHERE.format("aclose")):
            await kept[0].aclose()
        with pytest.raises(RuntimeError, match=ELSEWHERE.format("allocate")):
            await kept[0].allocate(64)
        assert not kept[0].closed and kept[0].regions() == ()

    anyio.run(leave_open, backend=first)
    anyio.run(refused, backend=later)
    engine.close()
    with pytest.warns(ResourceWarning, match="never closed"):
        kept.clear()
        gc.collect()


CALLS: dict[str, Callable[[Pair, af.Peer, af.ImmCounter], Any]] = {
    "write": lambda p, peer, counter: p.writer.write(p.source[:8], p.key, 0),
    "write_pages": lambda p, peer, counter: p.writer.write_pages(p.source, [0], p.key, [1], page_bytes=64),
    "scatter": lambda p, peer, counter: p.writer.scatter(p.source, []),
    "read": lambda p, peer, counter: p.writer.read(p.key, 0, p.source[:8]),
    "signal": lambda p, peer, counter: p.writer.signal(peer, 1),
    "barrier": lambda p, peer, counter: p.writer.barrier(af.PeerGroup([peer]), 1),
    "send": lambda p, peer, counter: p.writer.send(peer, b"x"),
    "counter": lambda p, peer, counter: p.writer.counter(),
    "watch": lambda p, peer, counter: p.writer.watch(),
    "statistics": lambda p, peer, counter: p.writer.statistics(),
    "regions": lambda p, peer, counter: p.writer.regions(),
    "why_text": lambda p, peer, counter: p.writer.why_text(),
    "take_trace": lambda p, peer, counter: p.writer.take_trace(),
    "take_nowait": lambda p, peer, counter: p.writer.messages().take_nowait(),
    "spin": lambda p, peer, counter: p.writer.messages().spin(0),
    "key": lambda p, peer, counter: p.source.key(),
    "close": lambda p, peer, counter: counter.close(),
    "stream_wait": lambda p, peer, counter: counter.stream_wait(0, 1),
}


async def test_a_call_from_another_thread_is_refused_by_name() -> None:
    async with open_pair() as p:
        peer, counter = await p.writer.connect(p.reader.address), p.writer.counter()
        before = p.writer.statistics()
        for name, call in CALLS.items():
            with pytest.raises(RuntimeError, match=ELSEWHERE.format(name)):
                await anyio.to_thread.run_sync(call, p, peer, counter)
        assert p.writer.statistics() == before
        assert counter.value == 0  # it is open


async def test_a_transfer_is_asked_and_cancelled_in_its_thread_alone() -> None:
    async with open_pair(hold=True, window=0) as p:
        transfer = p.writer.write(p.source[:8], p.key, 0)
        for name, call in (("done", lambda: transfer.done), ("cancel", transfer.cancel)):
            with pytest.raises(RuntimeError, match=ELSEWHERE.format(name)):
                await anyio.to_thread.run_sync(call)
        p.network.window = None
        p.network.release()
        assert (await p.writer.write(p.source[:8], p.key, 0)).bytes == 8
        assert (await transfer).bytes == 8, "the refused cancel() stopped it"


async def test_threads_have_spin_store_and_values() -> None:
    async with open_pair() as p, p.writer.watch() as word:
        counter = p.reader.counter()
        transfer = p.writer.write(p.source[:8], p.key, 0, imm=counter.imm)
        await transfer

        def elsewhere() -> tuple[Any, ...]:
            word.store(7)
            return (
                counter.spin(1, 5.0),
                counter.value,
                word.value,
                transfer.result().bytes,
                transfer.bytes,
                bytes(p.target.memory[:2]),
                p.key.length,
                p.writer.address,
                p.writer.closed,
            )

        values = await anyio.to_thread.run_sync(elsewhere)
        assert values == (1, 1, 7, 8, 8, b"\x00\x01", len(p.target), p.writer.address, False)


async def test_other_threads_still_close_nothing_of_a_fabric_that_is_left() -> None:
    async with open_fake(FakeNetwork()) as fabric:
        with pytest.raises(RuntimeError, match="aclose"):
            await anyio.to_thread.run_sync(partial(anyio.run, fabric.aclose))
    assert fabric.closed
