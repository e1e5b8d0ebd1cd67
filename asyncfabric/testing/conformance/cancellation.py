"""Checks of cancellation and closing (INV-2): once an await ended, by any way, its memory is the caller's alone.

The test of it: overwrite the source with SCORCH the moment the await ended, then look for SCORCH at the target.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import anyio

import asyncfabric as af
from asyncfabric.testing.conformance.setting import (
    MIB,
    POISON,
    SCORCH,
    FabricFactory,
    Pair,
    assert_bytes,
    awaiting,
    cancelled_after,
    carried_address,
    carried_key,
    memory_of,
    open_pair,
    skip,
    until,
    view_of,
)

PIECE = MIB
PIECES = 32


async def _settle(pair: Pair) -> None:
    """Return once a later write of the same writer was counted: what was posted before it had its time to land."""
    region, _ = await pair.source(4096)
    exposed, _ = await pair.poisoned(4096)
    counter = pair.target.counter()
    for number in range(1, 11):
        await pair.writer.write(region, carried_key(exposed), 0, imm=counter.imm)
        await counter.wait(number)


def _scorch(memory: Any) -> None:
    memory[:] = bytes([SCORCH]) * len(memory)


async def check_cancelled_transfers_are_drained(factory: FabricFactory) -> None:
    """Cancel at many moments of a long transfer: no byte of the overwritten source ever shows up at the target."""
    async with open_pair(factory) as pair:
        region, content = await pair.source(PIECE)
        safe = content.replace(bytes([SCORCH]), b"\0").replace(bytes([POISON]), b"\1")
        exposed, memory = await pair.poisoned(PIECES * PIECE)
        key = carried_key(exposed)
        await pair.peer()
        for patience in (0, 0, 1, 2, 3, 5, 8, 13):
            view_of(region)[:] = safe
            memory[:] = bytes([POISON]) * len(memory)
            transfers = [pair.writer.write(region, key, number * PIECE) for number in range(PIECES)]
            await cancelled_after(patience, [partial(awaiting, transfer) for transfer in transfers])
            _scorch(view_of(region))
            left = sum(transfer.bytes for transfer in transfers)
            await _settle(pair)
            got = bytes(memory)
            assert bytes([SCORCH]) not in got, f"read after the await was cancelled (patience {patience})"
            landed = len(got) - got.count(POISON)
            assert landed <= left, f"{landed} bytes landed, but only {left} are reported to have left"


async def check_cancelled_before_the_first_post(factory: FabricFactory) -> None:
    """A transfer awaited in a cancelled scope raises; if 0 bytes left, then nothing landed and nothing was counted."""
    async with open_pair(factory) as pair:
        region, _ = await pair.source(PIECE)
        view_of(region)[:] = bytes(PIECE)
        exposed, memory = await pair.poisoned(PIECE)
        key = carried_key(exposed)
        counter = pair.target.counter()
        for _ in range(20):
            memory[:] = bytes([POISON]) * PIECE
            before = counter.value
            with anyio.CancelScope() as scope:
                scope.cancel()
                transfer = pair.writer.write(region, key, 0, imm=counter.imm)
                await transfer
            assert scope.cancelled_caught or transfer.bytes == PIECE
            await _settle(pair)
            landed = PIECE - bytes(memory).count(POISON)
            assert landed <= transfer.bytes
            if transfer.bytes == 0:
                assert counter.value == before


async def check_cancelled_at_each_await(factory: FabricFactory) -> None:
    """Each awaitable call may be cancelled at once or a little later; the fabric stays usable and consistent."""
    async with open_pair(factory) as pair:
        region, _ = await pair.source(MIB)
        exposed, _ = await pair.poisoned(MIB)
        key = carried_key(exposed)
        peer = await pair.peer()
        counter = pair.target.counter()
        fabric = pair.writer

        async def register() -> None:
            await (await memory_of(factory, fabric, 100_000, "read-write")).release()

        async def revoke() -> None:
            await scratch.revoke()

        async def warm() -> None:
            await fabric.warm([carried_address(pair.target)])

        async def connect() -> None:
            await fabric.connect(carried_address(pair.target))

        async def write() -> None:
            await fabric.write(region, key, 0)

        async def pages() -> None:
            numbers = list(range(256))
            await fabric.write_pages(
                region, numbers, key, numbers, page_bytes=4096, source_stride=4096, target_stride=4096
            )

        async def signal() -> None:
            await fabric.signal(peer, 1000)

        async def send() -> None:
            await fabric.send(peer, b"perhaps")

        async def wait() -> None:
            await counter.wait(1 << 40)

        async def iterate() -> None:
            async for _ in counter:
                pass

        async def receive() -> None:
            async for _ in fabric.messages():
                pass

        async def writable() -> None:
            await fabric.wait_writable()

        scratch = await memory_of(factory, fabric, 4096, "read-write")
        calls: list[Callable[[], Coroutine[Any, Any, None]]] = [
            register,
            revoke,
            warm,
            connect,
            write,
            pages,
            signal,
            send,
            wait,
            iterate,
            receive,
            writable,
        ]
        for call in calls:
            for patience in (0, 1, 2, 4):
                await cancelled_after(patience, [call])
        exposed_again, memory = await pair.poisoned(MIB)
        content = bytes(view_of(region))
        await fabric.write(region, carried_key(exposed_again), 0, imm=counter.imm)
        assert await counter.wait(1) == 1
        assert_bytes(memory, content, "after all cancellations")


async def check_any_number_of_awaiters(factory: FabricFactory) -> None:
    """Several tasks await one transfer and all get its result, also those that come later."""
    async with open_pair(factory) as pair:
        region, _ = await pair.source(MIB)
        exposed, _ = await pair.poisoned(MIB)
        transfer = pair.writer.write(region, carried_key(exposed), 0)
        results = []

        async def collect() -> None:
            results.append(await transfer)

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(collect)
        assert [result.bytes for result in results] == [MIB] * 5
        assert (await transfer) == results[0], "a finished transfer can be awaited again"


async def check_release_with_work_in_flight(factory: FabricFactory) -> None:
    """`release()` of a source returns when nothing reads it any more, whoever awaits the transfers or not."""
    async with open_pair(factory) as pair:
        if factory.memory != "foreign":
            skip("the memory of an allocated region is gone after release: nothing left to scorch")
        buffer = bytearray(b"\1" * PIECE)
        region = await pair.writer.register(buffer, access="local")
        exposed, memory = await pair.poisoned(PIECES * PIECE)
        key = carried_key(exposed)
        transfers = [pair.writer.write(region, key, number * PIECE) for number in range(PIECES)]
        await region.release()
        _scorch(memoryview(buffer))
        for transfer in transfers:
            try:
                await transfer
            except af.FabricError:
                continue
        await _settle(pair)
        assert bytes([SCORCH]) not in bytes(memory), "read after release() returned"
        try:
            pair.writer.write(region, key, 0)
        except af.ClosedError:
            return
        raise AssertionError("a released region was written from")


async def check_release_of_a_target_under_fire(factory: FabricFactory) -> None:
    """After `release()` of a target returned no write lands in it; its writers end, well or with an error."""
    async with open_pair(factory) as pair:
        if factory.memory != "foreign":
            skip("the memory of an allocated region is gone after release: nothing left to look at")
        region, _ = await pair.source(PIECE)
        buffer = bytearray(PIECES * PIECE)
        exposed = await pair.target.register(buffer, access="read-write")
        key = carried_key(exposed)
        await pair.peer()
        transfers = [pair.writer.write(region, key, number * PIECE) for number in range(PIECES)]
        await exposed.release()
        _scorch(memoryview(buffer))
        for transfer in transfers:
            try:
                await transfer
            except (af.StaleKeyError, af.TransferError, af.PeerError):
                continue
        await _settle(pair)
        assert bytes(buffer) == bytes([SCORCH]) * len(buffer), "written after release() returned"


async def check_close_drains(factory: FabricFactory) -> None:
    """Leaving `open_fabric` drains what nobody awaited: all of it is at the target, all of it counted."""
    async with factory.target() as target:
        exposed = await memory_of(factory, target, PIECES * PIECE, "read-write")
        counter = target.counter()
        async with factory.open() as writer:
            region = await memory_of(factory, writer, PIECE, "local")
            view_of(region)[:] = b"\7" * PIECE
            key = carried_key(exposed)
            transfers = [writer.write(region, key, number * PIECE, imm=counter.imm) for number in range(PIECES)]
        assert await counter.wait(PIECES) == PIECES
        assert bytes(view_of(exposed)) == b"\7" * (PIECES * PIECE)
        for transfer in transfers:
            assert (await transfer).bytes == PIECE
        try:
            writer.counter()
        except af.ClosedError:
            return
        raise AssertionError("a closed fabric opened a counter")


async def check_cancelled_close(factory: FabricFactory) -> None:
    """Cancellation while work is in flight still leaves no reader of the source behind."""
    buffer = bytearray(b"\1" * PIECE)
    async with factory.target() as target:
        exposed = await memory_of(factory, target, PIECES * PIECE, "read-write")
        memory = view_of(exposed)
        memory[:] = bytes([POISON]) * len(memory)
        with anyio.CancelScope() as scope:
            async with factory.open() as writer:
                region = await writer.register(buffer, access="local")
                key = carried_key(exposed)
                for number in range(PIECES):
                    writer.write(region, key, number * PIECE)
                scope.cancel()
        _scorch(memoryview(buffer))
        async with factory.open() as other:
            peer = await other.connect(carried_address(target))
            counter = target.counter()
            for number in range(1, 11):
                await other.signal(peer, counter.imm)
                await counter.wait(number)
        assert bytes([SCORCH]) not in bytes(memory), "read after the fabric was closed"


async def check_closing_under_waiting_calls(factory: FabricFactory) -> None:
    """Whoever waits while another task closes the fabric gets an answer or ClosedError, at whatever moment it is."""

    async def attempt(call: Callable[[], Awaitable[object]]) -> None:
        try:
            await call()
        except (af.ClosedError, af.PeerError):
            pass

    async with factory.open() as other:
        for moment in range(24 if factory.peers > 16 else 8):  # slow transports open slowly
            async with factory.target() as fabric:
                counter, peer = fabric.counter(), await other.connect(carried_address(fabric))
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(attempt, partial(memory_of, factory, fabric, 4096, "read-write"))
                    tasks.start_soon(attempt, partial(fabric.connect, carried_address(other)))
                    tasks.start_soon(attempt, partial(counter.wait, 1))
                    for _ in range(moment % 8):
                        await anyio.lowlevel.checkpoint()
                    transfer = other.signal(peer, counter.imm)
                    await fabric.aclose()
                await attempt(partial(awaiting, transfer))


async def check_exceptions_in_user_code(factory: FabricFactory) -> None:
    """An exception of the user closes one fabric in good order, arrives unchanged, and harms nobody else."""

    class Mine(Exception):
        pass

    async with factory.target() as target:
        exposed = await memory_of(factory, target, PIECE, "read-write")
        counter = target.counter()
        caught = False
        try:
            async with factory.open() as writer:
                region = await memory_of(factory, writer, PIECE, "local")
                writer.write(region, carried_key(exposed), 0, imm=counter.imm)
                raise Mine
        except Mine:
            caught = True
        assert caught
        await until(lambda: counter.value <= 1)
        async with factory.open() as writer:
            before = counter.value
            await writer.signal(await writer.connect(carried_address(target)), counter.imm)
            assert await counter.wait(before + 1) >= before + 1


async def check_one_failure_harms_that_transfer_alone(factory: FabricFactory) -> None:
    """A transfer with a stale key fails; those before and after it, to the same peer, do not."""
    async with open_pair(factory) as pair:
        region, content = await pair.source(100_000)
        exposed, memory = await pair.poisoned(100_000)
        doomed, doomed_memory = await pair.poisoned(100_000)
        good, bad = carried_key(exposed), carried_key(doomed)
        await doomed.revoke()
        counter = pair.target.counter()
        before = pair.writer.write(region[0:50_000], good, 0, imm=counter.imm)
        failed = 0
        try:
            await pair.writer.write(region, bad, 0)
        except af.StaleKeyError:
            failed += 1
        after = pair.writer.write(region[50_000:], good, 50_000, imm=counter.imm)
        assert await counter.wait(2) == 2
        assert ((await before).bytes, (await after).bytes, failed) == (50_000, 50_000, 1)
        assert_bytes(memory, content, "the good ones")
        assert set(doomed_memory) == {POISON}
