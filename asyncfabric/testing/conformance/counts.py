"""Checks of counts (INV-1): a receiver knows the number to wait for without knowing rails, shards or batches.

"Exactly" is checked by a signal of the same writer that is counted last, after everything before it was awaited: a
surplus would show in the total.
"""

from __future__ import annotations

import time
from itertools import pairwise

import anyio
import anyio.to_thread

import asyncfabric as af
from asyncfabric import ScatterTarget
from asyncfabric.testing.conformance.setting import (
    MIB,
    FabricFactory,
    carried_address,
    carried_key,
    open_pair,
    until,
)


async def check_counts_of_each_op(factory: FabricFactory) -> None:
    """A write counts 1 at any length, pages count n, scatter, signal and barrier count 1 at each target."""
    async with open_pair(factory) as pair:
        region, _ = await pair.source(3 * MIB)
        exposed, _ = await pair.poisoned(3 * MIB)
        key = carried_key(exposed)
        peer = await pair.peer()
        counter = pair.target.counter()
        imm, total = counter.imm, 0
        for length in (0, 1, 4096, 16_385, 200_001, 3 * MIB):
            await pair.writer.write(region[0:length], key, 0, imm=imm)
            total += 1
            assert await counter.wait(total) == total, f"a write of {length} bytes"
        for pages in (0, 1, 2, 1023, 1024, 1025, 2049):
            numbers = list(range(pages))
            await pair.writer.write_pages(
                region, numbers, key, numbers, page_bytes=512, source_stride=512, target_stride=512, imm=imm
            )
            total += pages
            assert await counter.wait(total) == total, f"{pages} pages"
        for lengths in ((), (0,), (7,), (1, 0, 4097, 100_001)):
            targets = [ScatterTarget(key, 0, 0, length) for length in lengths]
            await pair.writer.scatter(region, targets, imm=imm)
            total += len(targets)
            assert await counter.wait(total) == total, f"scatter of {lengths}"
        for _ in range(3):
            await pair.writer.signal(peer, imm)
            total += 1
        await pair.writer.barrier(af.PeerGroup([peer]), imm)
        await pair.writer.barrier(af.PeerGroup([]), imm)
        total += 1
        assert await counter.wait(total) == total
        await pair.writer.signal(peer, imm)
        assert await counter.wait(total + 1) == total + 1, "nothing was counted twice"


async def check_writes_without_imm_do_not_count(factory: FabricFactory) -> None:
    """Only what names the counter is counted."""
    async with open_pair(factory) as pair:
        region, _ = await pair.source(MIB)
        exposed, _ = await pair.poisoned(MIB)
        key = carried_key(exposed)
        counter, other = pair.target.counter(), pair.target.counter()
        assert counter.imm != other.imm
        await pair.writer.write(region, key, 0)
        await pair.writer.write(region, key, 0, imm=other.imm)
        await other.wait(1)
        await pair.writer.signal(await pair.peer(), counter.imm)
        assert await counter.wait(1) == 1


async def check_early_arrivals(factory: FabricFactory) -> None:
    """Arrivals before the counter exists are kept: count first, arm later."""
    async with open_pair(factory) as pair:
        region, _ = await pair.source(200_000)
        exposed, _ = await pair.poisoned(200_000)
        key = carried_key(exposed)
        for _ in range(5):
            await pair.writer.write(region, key, 0, imm=4711)
        numbers = list(range(100))
        await pair.writer.write_pages(
            region, numbers, key, numbers, page_bytes=64, source_stride=64, target_stride=64, imm=4711
        )
        await until(lambda: pair.target.statistics().early_arrivals > 0)
        counter = pair.target.counter(4711)
        assert await counter.wait(105) == 105
        await pair.writer.signal(await pair.peer(), 4711)
        assert await counter.wait(106) == 106


async def check_surplus(factory: FabricFactory) -> None:
    """More arrivals than awaited satisfy the wait and stay counted."""
    async with open_pair(factory) as pair:
        peer = await pair.peer()
        counter = pair.target.counter()
        for _ in range(5):
            await pair.writer.signal(peer, counter.imm)
        assert await counter.wait(5) == 5
        assert await counter.wait(3) == 5, "a wait for less than what came returns at once"
        assert counter.value == 5
        assert await counter.wait(0) == 5


async def check_arrivals_that_step_over_a_target(factory: FabricFactory) -> None:
    """A batch of pages may count in one step: waits for less than all of it end as well."""
    async with open_pair(factory) as pair:
        region, _ = await pair.source(100 * 64)
        exposed, _ = await pair.poisoned(100 * 64)
        key = carried_key(exposed)
        counter = pair.target.counter()
        numbers = list(range(100))

        async def wait(target: int) -> None:
            assert await counter.wait(target) >= target

        for turn in range(3):
            async with anyio.create_task_group() as tasks:
                for target in (7, 33, 99, 100):
                    tasks.start_soon(wait, 100 * turn + target)
                await anyio.lowlevel.checkpoint()
                await pair.writer.write_pages(region, numbers, key, numbers, page_bytes=64, imm=counter.imm)
        assert await counter.wait(300) == 300


async def check_many_waiters(factory: FabricFactory) -> None:
    """Any number of tasks wait for different values of one counter."""
    async with open_pair(factory) as pair:
        peer = await pair.peer()
        counter = pair.target.counter()
        woken: list[int] = []

        async def wait(target: int) -> None:
            value = await counter.wait(target)
            assert value >= target
            woken.append(target)

        async with anyio.create_task_group() as tasks:
            for target in (3, 1, 2, 3, 10):
                tasks.start_soon(wait, target)
            for number in range(1, 11):
                await pair.writer.signal(peer, counter.imm)
                await counter.wait(number)
        assert sorted(woken) == [1, 2, 3, 3, 10]


async def check_counter_iteration(factory: FabricFactory) -> None:
    """`async for` shows growing values, coalesced, and ends up at the total."""
    async with open_pair(factory) as pair:
        peer = await pair.peer()
        counter = pair.target.counter()
        seen: list[int] = []

        async def watch() -> None:
            async for value in counter:
                seen.append(value)
                if value == 50:
                    return

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            for _ in range(50):
                await pair.writer.signal(peer, counter.imm)
        assert seen[-1] == 50
        assert all(a < b for a, b in pairwise(seen)), seen


async def check_counter_spin(factory: FabricFactory) -> None:
    """Threads without an event loop spin on a counter, and see a deadline as an error."""
    async with open_pair(factory) as pair:
        peer = await pair.peer()
        counter = pair.target.counter()

        async def signal() -> None:
            for _ in range(10):
                await pair.writer.signal(peer, counter.imm)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(signal)
            value = await anyio.to_thread.run_sync(lambda: counter.spin(10, 20.0))
        assert value == 10
        started = time.monotonic()
        try:
            await anyio.to_thread.run_sync(lambda: counter.spin(11, 0.05))
        except af.TransferError:
            assert time.monotonic() - started < 10
        else:
            raise AssertionError("spin returned a count that never came")


async def check_counter_generations(factory: FabricFactory) -> None:
    """A late arrival for a closed counter is stale; the next user of the same imm starts at 0 and gets only its own."""
    async with open_pair(factory) as pair:
        peer = await pair.peer()
        for generation in range(6):  # more than the wire has numbers for
            counter = await pair.target.open_counter(99)
            assert counter.value == 0, f"generation {generation}"
            await pair.writer.signal(peer, 99)
            assert await counter.wait(1) == 1
            counter.close()
            stale = pair.target.statistics().stale_arrivals
            await pair.writer.signal(peer, 99)
            await until(lambda stale=stale: pair.target.statistics().stale_arrivals > stale)  # type: ignore[misc]


async def check_late_counts_reach_no_later_counter(factory: FabricFactory) -> None:
    """What was submitted before a counter is closed, and not awaited, counts for no later one of the same imm."""
    async with open_pair(factory) as pair:
        peer = await pair.peer()
        for generation in range(25):
            with await pair.target.open_counter(98) as counter:
                assert counter.value == 0, f"generation {generation}"
                for _ in range(12):
                    pair.writer.signal(peer, 98)
                await counter.wait(1 + generation % 12)
        counter = await pair.target.open_counter(98)
        assert counter.value == 0
        await pair.writer.signal(peer, 98)
        assert await counter.wait(1) == 1


async def check_closes_are_shown_until_they_are_confirmed(factory: FabricFactory) -> None:
    """While a peer has not confirmed a close, opening the imm raises and names it; then nothing waits any more."""
    async with open_pair(factory) as pair:
        peer = await pair.peer()
        for _ in range(20):
            counter = await pair.target.open_counter(97)
            pair.writer.signal(peer, 97)
            counter.close()
            try:
                pair.target.counter(97).close()
            except af.BusyError as refusal:
                assert "imm 97" in str(refusal)
            with pair.target.counter() as other:  # another imm waits for nobody
                assert other.imm != 97
        (await pair.target.open_counter(97)).close()
        await until(lambda: pair.target.statistics().unconfirmed_closes == 0)
        assert not [line for line in pair.target.why() if "close of the counter" in line.what]


async def check_who_meets_late_counts_for_reopened_counters(factory: FabricFactory) -> None:
    """However many counters were opened before, and closed, peers meet, and count for those that are open now."""
    async with factory.target() as target, factory.open() as writer:
        imms = range(0, 15_000, 5)  # apart, so that they cannot be reported as a few ranges, nor in one message
        for imm in (*imms, *imms):
            target.counter(imm).close()
        counters = {imm: target.counter(imm) for imm in (imms[0], imms[1_500], imms[-1])}
        peer = await writer.connect(carried_address(target))
        for imm, counter in counters.items():
            await writer.signal(peer, imm)
            assert await counter.wait(1) == 1
        assert target.statistics().stale_arrivals == 0


async def check_closing_a_counter_wakes_its_waiters(factory: FabricFactory) -> None:
    """A wait on a counter that is closed raises instead of hanging, and so does every later use."""
    async with open_pair(factory) as pair:
        counter = pair.target.counter()
        waiting = anyio.Event()
        raised: list[BaseException] = []

        async def wait() -> None:
            waiting.set()
            try:
                await counter.wait(1)
            except af.ClosedError as error:
                raised.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await waiting.wait()
            await anyio.lowlevel.checkpoint()
            counter.close()
        assert len(raised) == 1
        counter.close()
        try:
            await counter.wait(1)
        except af.ClosedError:
            return
        raise AssertionError("a closed counter was waited for")


async def check_waits_for_a_peer_that_closed(factory: FabricFactory) -> None:
    """A wait that names a peer ends by name when that peer closes in good order, and at once when it closed before."""
    async with factory.target() as target:
        counter = target.counter()
        raised: list[af.PeerError] = []

        async def wait() -> None:
            try:
                await counter.wait(2, peers=[source])
            except af.PeerError as error:
                raised.append(error)

        async with anyio.create_task_group() as tasks, factory.open() as writer:
            source = await target.connect(carried_address(writer))
            await writer.signal(await writer.connect(carried_address(target)), counter.imm)
            assert await counter.wait(1, peers=[source]) == 1
            tasks.start_soon(wait)
        await wait()
        assert len(raised) == 2 and source.lost
        assert all(repr(source) in str(error) and "1 of 2 arrivals" in str(error) for error in raised)
        assert await counter.wait(1, peers=[source]) == 1, "what came before counts"


async def check_imm_bounds(factory: FabricFactory) -> None:
    """Imm is 0 .. 2**20 - 1; the ends work, what lies beyond raises at the call."""
    async with open_pair(factory) as pair:
        peer = await pair.peer()
        for imm in (0, af.MAX_IMM):
            counter = pair.target.counter(imm)
            assert counter.imm == imm
            await pair.writer.signal(peer, imm)
            assert await counter.wait(1) == 1
        for imm in (-1, af.MAX_IMM + 1, 1 << 32):
            _refused(lambda imm=imm: pair.writer.signal(peer, imm), imm)
            _refused(lambda imm=imm: pair.target.counter(imm), imm)
        assert bytes(carried_address(pair.target)) == bytes(pair.target.address)


def _refused(call: object, imm: int) -> None:
    try:
        call()  # type: ignore[operator]
    except ValueError as error:
        assert str(imm) in str(error), f"the text names the value: {error}"
        return
    raise AssertionError(f"imm {imm} was taken")
