"""Cancellation at every await of the public API: it ends, breaks nothing, leaks nothing, and INV-2 holds meanwhile.

Each await is cancelled twice: in a scope that is cancelled before it begins, and while it waits for the engine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from fabrics import Outcome, Pair, open_fake, open_pair, settled

import asyncfabric as af
from asyncfabric.testing import FakeNetwork

pytestmark = pytest.mark.anyio
TIGHT = af.FabricConfig(max_ops=2)


async def next_message(p: Pair) -> object:
    async for message in p.writer.messages():
        return message
    raise AssertionError("the fabric was closed")


async def next_change(p: Pair) -> object:
    async with p.writer.watch() as word:
        async for change in word:
            return change
    raise AssertionError("the watch was closed")


async def next_count(p: Pair) -> object:
    with p.writer.counter() as counter:
        async for value in counter:
            return value
    raise AssertionError("the counter was closed")


async def count_of_peer(p: Pair) -> object:
    with p.writer.counter() as counter:
        return await counter.wait(1, peers=[await p.writer.connect(p.reader.address)])


async def room(p: Pair) -> object:
    for _ in range(2):
        p.writer.write(p.source[:8], p.key, 0)
    await p.writer.wait_writable()
    return None


async def sent(p: Pair) -> object:
    peer = await p.writer.connect(p.reader.address)
    return await p.writer.send(peer, b"hello")


async def closed_with_work(p: Pair) -> object:
    p.writer.write(p.source, p.key, 0)
    return await p.writer.aclose()


# Controls wait while `hold_control`, data while `hold`, the rest until somebody sends something.
AWAITS: dict[str, Callable[[Pair], Awaitable[Any]]] = {
    "connect": lambda p: p.writer.connect(p.reader.address),
    "warm": lambda p: p.writer.warm([p.reader.address, p.writer.address]),
    "allocate": lambda p: p.writer.allocate(4096),
    "register": lambda p: p.writer.register(bytearray(4096)),
    "revoke": lambda p: p.source.revoke(),
    "release": lambda p: p.source.release(),
    "write": lambda p: _awaited(p.writer.write(p.source, p.key, 0)),
    "write_pages": lambda p: _awaited(
        p.writer.write_pages(p.source, range(8), p.key, range(8), page_bytes=4096, imm=5)
    ),
    "scatter": lambda p: _awaited(p.writer.scatter(p.source, [af.ScatterTarget(p.key, 0, 0, 8)])),
    "read": lambda p: _awaited(p.writer.read(p.key, 0, p.source)),
    "read_pages": lambda p: _awaited(p.writer.read_pages(p.key, range(8), p.source, range(8), page_bytes=4096)),
    "wait_all": lambda p: af.wait_all([p.writer.write(p.source, p.key, 0), p.writer.write(p.source[:8], p.key, 0)]),
    "send": sent,
    "messages": next_message,
    "watch": next_change,
    "counter": next_count,
    "counter of a peer": count_of_peer,
    "wait_writable": room,
    "aclose": closed_with_work,
}


async def _awaited(transfer: af.Transfer) -> af.TransferResult:
    return await transfer


@asynccontextmanager
async def delivering(p: Pair) -> AsyncIterator[None]:
    """Let a failing test end: a task that drains cannot be cancelled away."""
    try:
        yield
    finally:
        p.network.release()


async def still_works(p: Pair) -> None:
    """Check that the fabric moves and counts as if nothing had been."""
    source = await p.writer.allocate(64)
    with p.reader.counter() as counter:
        await p.writer.write(source[:8], p.target.key(), 0, imm=counter.imm)
        assert await counter.wait(1) == 1
    await source.release()
    assert p.writer.why() == []


@pytest.mark.parametrize("name", AWAITS)
async def test_cancelled_before_it_begins(name: str) -> None:
    async with open_pair(TIGHT) as p:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await AWAITS[name](p)
        # Closing with nothing to drain is done by then, so it may return; every other await must notice.
        assert scope.cancelled_caught or p.writer.closed, "a cancelled scope was not noticed"
        if not p.writer.closed:
            await still_works(p)


@pytest.mark.parametrize("name", AWAITS)
async def test_cancelled_while_it_waits(name: str) -> None:
    async with open_pair(TIGHT, hold=True) as p, anyio.create_task_group() as tasks, delivering(p):
        p.network.hold_control = True
        regions = p.writer.statistics().regions
        waiting = Outcome()
        tasks.start_soon(waiting.run, lambda: AWAITS[name](p))
        await settled()
        assert not waiting.ended, "it did not wait: the test cancels nothing"
        waiting.scope.cancel()
        await settled()
        p.network.release()
        await settled()
        assert waiting.ended, "it did not end after the cancellation, with everything delivered"
        assert waiting.cancelled and waiting.scope.cancelled_caught
        if not p.writer.closed:
            await still_works(p)
            assert p.writer.statistics().regions == regions - p.source.released


async def test_a_cancelled_disconnect_goes_on() -> None:
    async with open_pair() as p, anyio.create_task_group() as tasks, delivering(p):
        peer = await p.writer.connect(p.reader.address)
        p.network.hold_control = True
        waiting = Outcome()
        tasks.start_soon(waiting.run, lambda: p.writer.disconnect(peer))
        await settled()
        waiting.scope.cancel()
        await settled()
        assert waiting.cancelled
        p.network.release()
        assert p.writer.statistics().peers[0].state == "disconnected"


@pytest.mark.parametrize("name", ["write", "write_pages", "read", "read_pages", "wait_all", "send"])
async def test_a_cancelled_transfer_does_not_return_while_its_memory_is_in_use(name: str) -> None:
    async with (
        open_pair(hold=True, window=1, request_bytes=4096) as p,
        anyio.create_task_group() as tasks,
        delivering(p),
    ):
        waiting = Outcome()
        tasks.start_soon(waiting.run, lambda: AWAITS[name](p))
        await settled()
        assert p.network.in_flight == 1
        waiting.scope.cancel()
        await settled()
        assert not waiting.ended, "the await returned while a request was in flight"
        p.network.deliver(1)
        await settled()
        assert waiting.cancelled and p.network.in_flight == 0


async def test_an_exception_in_user_code_leaves_the_fabric_whole() -> None:
    async with open_pair(hold=True) as p:
        with pytest.raises(ExceptionGroup) as caught:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_awaited, p.writer.write(p.source, p.key, 0))
                await settled()
                p.network.hold = False
                tasks.start_soon(_broken, p)
        assert caught.group_contains(ZeroDivisionError)
        await still_works(p)


async def _broken(p: Pair) -> None:
    p.network.release()
    raise ZeroDivisionError


async def test_a_fabric_in_a_cancelled_scope_closes_all_the_same() -> None:
    network = FakeNetwork()
    with anyio.CancelScope() as scope:
        async with open_fake(network) as fabric:
            region = await fabric.allocate(64)
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught and fabric.closed
    with pytest.raises(af.ClosedError):
        region.key()
