"""Pools and leases: order of the queue, back-pressure, quarantine, the fence, and what an owner may do wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest
import torch
import trio
from fabrics import open_fake, settled

import asyncfabric as af
from asyncfabric.kv import KvLayout, KvPool, PageLedger, open_pool
from asyncfabric.kv.revoker import QUARANTINE_PATIENCE_S
from asyncfabric.testing import FakeNetwork

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=4, page_tokens=4, dtype="float32")


@asynccontextmanager
async def pool_of(pages: int = 8, layout: KvLayout = LAYOUT, **options: Any) -> AsyncIterator[KvPool]:
    async with open_fake(FakeNetwork()) as fabric, open_pool(fabric, layout, pages=pages, **options) as pool:
        yield pool


async def expose(pool: KvPool, pages: int, owner: str = "exposed") -> Any:
    lease = await pool.lease(owner, pages=pages)
    await lease.offer(pool.layout, 1)
    return lease


@pytest.mark.anyio
async def test_what_cannot_be_extended_is_refused_and_the_books_are_right() -> None:
    """A negative number of pages took one off the stack of free ones that was never there."""
    async with pool_of() as pool, pool_of() as other:
        lease = await pool.lease("one", pages=2)
        with pytest.raises(ValueError, match="-1"):
            pool.extend_nowait(lease, -1)
        with pytest.raises(ValueError, match="another pool"):
            other.extend_nowait(lease, 1)
        assert pool.report().free == 6 and other.report().free == 8
        lease.release()
        with pytest.raises(af.ClosedError):
            pool.extend_nowait(lease, 1)
        assert pool.report().free == 8


@pytest.mark.anyio
async def test_pages_are_views_of_one_region() -> None:
    async with pool_of(seed=3) as pool:
        tensor = pool.tensor()
        assert tensor.shape == (2, 8, 2, 2, 4, 4) and tensor.dtype is torch.float32
        async with await pool.lease("one", tokens=5) as lease:
            assert len(lease.pages) == 2 and lease.slot == -1
            lease.page(1, 1)[:] = np.frombuffer(np.full(64, 2.5, np.float32).tobytes(), np.uint8)
            assert (tensor[1, int(lease.pages[1])] == 2.5).all()
            assert (tensor != 0).sum() == 64
            with pytest.raises(ValueError, match=r"layer must be in 0\.\.1"):
                lease.page(2, 0)
        del tensor


@pytest.mark.anyio
async def test_memory_of_the_caller() -> None:
    memory = np.zeros(LAYOUT.pool_bytes(8), np.uint8)
    async with pool_of(buffer=memory) as pool:
        pool.page(1, 7)[:] = 9
        assert (memory[-LAYOUT.page_bytes :] == 9).all() and memory.sum() == 9 * LAYOUT.page_bytes
    with pytest.raises(ValueError, match=r"the buffer has 100 bytes, 8 pages need 4096"):
        async with pool_of(buffer=bytearray(100)):
            pass


@pytest.mark.anyio
async def test_a_wait_for_pages_is_cancelled_while_the_pool_is_closed() -> None:
    """Whoever leaves the pool by cancelling its users gets the cancellation, not an error of the queue."""

    async def hold(pool: KvPool) -> None:
        async with await pool.lease("holds", pages=1):
            await anyio.sleep_forever()

    async with (
        open_fake(FakeNetwork()) as fabric,
        anyio.create_task_group() as tasks,
        open_pool(fabric, LAYOUT, pages=1) as pool,
    ):
        for use in (hold, partial(KvPool.lease, owner="waits", pages=1)):
            tasks.start_soon(use, pool)
            await settled()
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_first_come_first_served() -> None:
    """A large request is not overtaken by a small one that would fit."""
    order: list[str] = []
    async with pool_of() as pool, anyio.create_task_group() as tasks:
        first = await pool.lease("first", pages=6)

        async def take(owner: str, pages: int) -> None:
            async with await pool.lease(owner, pages=pages):
                order.append(owner)

        for owner, pages in (("large", 7), ("small", 2), ("last", 8)):
            tasks.start_soon(take, owner, pages)
            await settled()
        assert order == []
        with pytest.raises(af.BusyError, match="3 others wait"):
            pool.lease_nowait("impatient", pages=1)
        with pytest.raises(af.BusyError, match="3 others wait"):
            pool.extend_nowait(first, 1)
        first.release()
        await settled()
        assert order == ["large", "small", "last"]
        assert pool.report().free == 8


@pytest.mark.anyio
async def test_who_leaves_the_queue_lets_the_next_pass() -> None:
    async with pool_of() as pool, anyio.create_task_group() as tasks, await pool.lease("first", pages=6):
        taken = anyio.Event()

        async def small() -> None:
            async with await pool.lease("small", pages=2):
                taken.set()

        async with anyio.create_task_group() as waiting:
            waiting.start_soon(_wait_for, pool, 7)
            await settled()
            tasks.start_soon(small)
            await settled()
            assert not taken.is_set()
            waiting.cancel_scope.cancel()
        await taken.wait()
    assert pool.report().free == 8


async def _wait_for(pool: KvPool, pages: int) -> None:
    await pool.lease("large", pages=pages)
    raise AssertionError("there were not so many pages")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.anyio
async def test_a_lease_that_is_granted_and_cancelled_at_once_goes_back(anyio_backend: str) -> None:
    """Only a task that asyncio itself cancels can be cancelled between the grant and its next step."""
    async with pool_of() as pool:
        first = await pool.lease("first", pages=8)
        second = asyncio.create_task(pool.lease("second", pages=8))
        await settled()
        first.release()  # grants
        second.cancel()  # before the waiter ran
        with pytest.raises(asyncio.CancelledError):
            await second
        assert pool.report().free == 8


@pytest.mark.anyio
async def test_misuse_is_reported_at_the_call() -> None:
    async with pool_of() as pool:
        with pytest.raises(ValueError, match="wants 9 pages, the pool has 8"):
            await pool.lease("greedy", pages=9)
        with pytest.raises(ValueError, match="either tokens or pages"):
            await pool.lease("vague")
        with pytest.raises(ValueError, match="no context slots"):
            await pool.lease("talkative", pages=1, context=True)
        with pytest.raises(af.BusyError, match="9 pages and 0 context slots wanted, 8 of 8"):
            pool.ledger.hold(1 << 40, 9, 0)
        lease = pool.lease_nowait("one", pages=1)
        with pytest.raises(af.ClosedError, match="not offered"):
            await lease.wait()
        await lease.offer(LAYOUT, 4)
        with pytest.raises(af.ClosedError, match="offered already"):
            await lease.offer(LAYOUT, 4)
        pool.extend_nowait(lease, 2)
        assert len(lease.pages) == 3 and len(set(lease.pages.tolist())) == 3
        lease.release()
        assert lease.release() is (pool.report().quarantined == 0)
        with pytest.raises(af.ClosedError, match="released"):
            await lease.wait()
    with pytest.raises(af.ClosedError, match="the pool is closed"):
        await pool.lease("late", pages=1)


@pytest.mark.anyio
async def test_errors_of_the_body_come_out_as_they_are() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with pool_of():
            raise KeyError("mine")


@pytest.mark.anyio
async def test_leaked_pages_are_named() -> None:
    with pytest.warns(ResourceWarning, match=r"'request 7': 3"):
        async with pool_of() as pool:
            await pool.lease("request 7", pages=3)


@pytest.mark.anyio
async def test_pages_of_an_exposed_lease_come_back_by_a_fence_only() -> None:
    async with pool_of() as pool:
        lease = await expose(pool, 5)
        key = pool.region.key(access="write")
        assert not lease.release()
        async with await pool.lease("all", pages=8):
            assert pool.revoker.fences == 1
            assert pool.region.key(access="write") != key, "the keys handed out before must be dead"


@pytest.mark.anyio
async def test_a_late_proof_frees_what_is_quarantined() -> None:
    async with pool_of() as pool:
        receiving = await expose(pool, 1)
        lease = await expose(pool, 5)
        lease.release()
        await settled()
        assert pool.report().quarantined == 5 and pool.revoker.fences == 0, "fenced while somebody received"
        lease.unexpose()
        assert pool.report().quarantined == 0 and pool.report().free == 7
        receiving.unexpose()
        receiving.release()
        await settled()
        assert pool.revoker.fences == 0


@pytest.mark.anyio
async def test_a_fence_by_hand_ends_who_receives() -> None:
    async with pool_of() as pool, anyio.create_task_group() as tasks:
        lease = await expose(pool, 2)
        failures: list[Exception] = []

        async def wait() -> None:
            try:
                await lease.wait()
            except af.FabricError as error:
                failures.append(error)

        tasks.start_soon(wait)
        await settled()
        await pool.fence()
        await settled()
        assert isinstance(failures[0], af.StaleKeyError) and "new one" in str(failures[0])
        assert not lease.exposed and lease.release()
        assert pool.report().free == 8


def test_new_leases_wait_when_a_quiet_moment_does_not_come() -> None:
    """Under load that never pauses, quarantined pages still come back: after a while new leases wait for the fence."""

    async def main() -> None:
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, trio.testing.MockClock)
        async with pool_of() as pool, trio.open_nursery() as nursery:
            receiving = await expose(pool, 1)
            (await expose(pool, 4)).release()
            (await pool.lease("in time", pages=1)).release()
            clock.jump(QUARANTINE_PATIENCE_S + 1)
            got: list[Any] = []

            async def take() -> None:
                got.append(await pool.lease("held back", pages=1))

            nursery.start_soon(take)
            await trio.testing.wait_all_tasks_blocked()
            assert not got and pool.revoker.fences == 0
            receiving.unexpose()
            receiving.release()
            await trio.testing.wait_all_tasks_blocked()
            assert pool.revoker.fences == 1
            got.pop().release()
            assert pool.report().free == 8

    trio.run(main, clock=trio.testing.MockClock())


@pytest.mark.anyio
async def test_a_fence_that_fails_frees_nothing_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pool_of() as pool:
        revoke, refused = type(pool.region).revoke, anyio.Event()

        async def refusing(region: Any) -> None:
            if not refused.is_set():
                refused.set()
                raise af.TransferError("a device may still touch it")
            await revoke(region)

        monkeypatch.setattr(type(pool.region), "revoke", refusing)
        (await expose(pool, 8)).release()
        await refused.wait()
        await anyio.lowlevel.checkpoint()
        assert pool.report().quarantined == 8
        async with await pool.lease("after", pages=8):
            assert (pool.revoker.fences, pool.revoker.failed_fences) == (1, 1)


def test_a_ledger_that_does_not_add_up_reports_it() -> None:
    ledger = PageLedger(4, 1)
    ledger.hold(1, 2, 1)
    ledger._held[1].pages[0] = 3
    with pytest.raises(af.InternalError, match="4 pages of 4, 3 distinct"):
        ledger.report()
    with pytest.raises(ValueError, match="each of the 3 pages once"):
        PageLedger(3, 0, [0, 1, 1])
    again = PageLedger(4, 0)
    again.hold(1, 1, 0)
    with pytest.raises(af.InternalError, match="holds pages already"):
        again.hold(1, 1, 0)
    again.fence_begin()
    with pytest.raises(af.InternalError, match="exposed while"):
        again.expose(1)
