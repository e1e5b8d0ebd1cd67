"""Streams that end before everything has arrived: cancelled, refused, failed, late, fenced. Every page comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest
from kv_fixture import SHAPE, KvFixture, Source, content_of, holds, idle, opening_of, prefill, streaming

import asyncfabric as af
from asyncfabric.kv import KvCancel, KvJob, KvLayout, KvRequest, KvStopped

pytestmark = pytest.mark.anyio

PATIENCE_S = (0.1, 1.0, 8.0)
"""Deadlines of a lease, tried until its source begins before them: a busy machine may take long to offer."""


@pytest.fixture(params=["fake", "native"])
def opening(request: pytest.FixtureRequest) -> Any:
    """How to open fabrics of one network."""
    return opening_of(request.param)


async def test_a_source_that_was_never_asked_is_not_waited_for() -> None:
    """Left while the source is still being connected to: it knows of no pages, so nobody confirms or fences."""
    layout = KvLayout(**SHAPE)

    async def go_on(still: af.Fabric) -> None:
        while True:
            still._dispatcher.engine.step()
            await anyio.lowlevel.checkpoint()

    async with (
        streaming(opening_of("native"), layout, layout, confirm_s=15.0) as found,
        anyio.create_task_group() as tasks,
    ):
        async with af.open_fabric(af.FabricConfig(polling="manual")) as still:  # answers nobody
            begun = anyio.current_time()
            async with await found.pool.lease("request", tokens=16) as lease:
                with anyio.move_on_after(0.1) as patience:
                    async with found.inbox.request(lease, [still.address], layout, 16) as request:
                        await request.wait()
            took = anyio.current_time() - begun
            tasks.start_soon(go_on, still)
        tasks.cancel_scope.cancel()
        assert patience.cancelled_caught and took < 10 and found.pool.revoker.fences == 0
        await idle(found)


async def test_cancelled_in_the_middle(opening: Any) -> None:
    """Leaving the request stops the source, which drains and confirms; the pages are free at once, without a fence."""
    layout = KvLayout(**SHAPE)
    half, stopped = anyio.Event(), anyio.Event()

    async def slow(source: Source, job: KvJob) -> None:
        async with await source.pool.lease("prefill", tokens=16) as lease:
            try:
                async with job.open_stream(lease.pages) as stream:
                    stream.push(0, 16)
                    half.set()
                    await anyio.sleep_forever()
            finally:
                stopped.set()

    async with streaming(opening, layout, layout, slow) as found:
        async with await found.pool.lease("request", tokens=16) as lease:
            async with found.inbox.request(lease, found.addresses, layout, 16):
                await half.wait()
            assert stopped.is_set() and not lease.exposed
        await idle(found)
        assert found.pool.revoker.fences == 0


async def test_a_source_that_never_confirms_is_fenced_off(opening: Any) -> None:
    """Its pages are quarantined until the keys are dead; a write of it afterwards fails and changes nothing."""
    layout = KvLayout(**SHAPE)
    late: list[Any] = []
    posted, fenced = anyio.Event(), anyio.Event()

    async def deaf(source: Source, job: KvJob) -> None:
        with anyio.CancelScope(shield=True):
            lease = await source.pool.lease("prefill", tokens=16)
            for layer in range(3):
                source.pool.page(layer, int(lease.pages[0]))[:] = 0xEE
            key = af.RegionKey.from_bytes(job.offer.pages_key)
            posted.set()
            await fenced.wait()
            try:
                await source.fabric.write_pages(
                    source.pool.region, [0, 1], key, [0, 1], page_bytes=layout.page_bytes, imm=1
                )
            except af.FabricError as error:
                late.append(error)
            lease.release()

    async with streaming(opening, layout, layout, deaf, confirm_s=0.02, pages=8) as found:
        lease = await found.pool.lease("request", pages=8)
        async with found.inbox.request(lease, found.addresses, layout, 16):
            await posted.wait()
        assert lease.exposed
        assert not lease.release()
        again = await found.pool.lease("next", pages=8)
        assert found.pool.revoker.fences == 1
        for layer in range(3):
            for page in range(8):
                found.pool.page(layer, page)[:] = 0x11
        fenced.set()
        await found.sources[0].outbox.drained()
        assert isinstance(late[0], af.StaleKeyError | af.PeerError), late
        assert (np.frombuffer(found.pool.region.memory, np.uint8) == 0x11).all(), "written after the fence"
        again.release()
        await idle(found)


async def test_a_source_that_fails_states_why(opening: Any) -> None:
    layout = KvLayout(**SHAPE)

    async def failing(source: Source, job: KvJob) -> None:
        async with await source.pool.lease("prefill", tokens=16) as lease, job.open_stream(lease.pages) as stream:
            stream.push(0, 8)
            raise RuntimeError("the model is out of memory")

    async with streaming(opening, layout, layout, failing) as found:
        lease = await found.pool.lease("request", tokens=16)
        async with lease, found.inbox.request(lease, found.addresses, layout, 16) as request:
            with pytest.raises(af.TransferError, match="out of memory"):
                await request.wait()
            assert not lease.exposed
        assert found.sources[0].outbox.failures == 1
        await idle(found)


@pytest.mark.parametrize(("field_name", "other"), [("model", "another"), ("dtype", "float32"), ("order", "NHD")])
async def test_a_layout_that_does_not_fit_is_refused_by_its_field(opening: Any, field_name: str, other: str) -> None:
    """At home when the source reported its layout, by the source when that was not the truth."""
    layout = KvLayout(**SHAPE)
    different = KvLayout(**(SHAPE | {field_name: other}))
    async with streaming(opening, different, layout) as found:
        async with await found.pool.lease("request", tokens=16) as lease:
            with pytest.raises(ValueError, match=field_name):
                async with found.inbox.request(lease, found.addresses, different, 16):
                    raise AssertionError("it was offered")
            assert not lease.exposed
            async with found.inbox.request(lease, found.addresses, layout, 16) as request:
                with pytest.raises(af.TransferError, match=f"layouts differ in {field_name}"):
                    await request.wait()
            assert not lease.exposed
        await idle(found)


@asynccontextmanager
async def soon_late(found: KvFixture, within_s: float) -> AsyncIterator[KvRequest]:
    """Request pages with a deadline that comes soon."""
    lease = await found.pool.lease("request", tokens=16, deadline=anyio.current_time() + within_s)
    async with lease, found.inbox.request(lease, found.addresses, found.layout, 16) as request:
        yield request


async def is_set(event: anyio.Event, within_s: float) -> bool:
    """Return whether an event comes in time."""
    with anyio.move_on_after(within_s):
        await event.wait()
    return event.is_set()


async def test_a_source_stops_by_itself_at_the_deadline(opening: Any) -> None:
    layout = KvLayout(**SHAPE)
    begun = anyio.Event()

    async def never(source: Source, job: KvJob) -> None:
        begun.set()
        await anyio.sleep_forever()

    for within_s in PATIENCE_S:
        async with streaming(opening, layout, layout, never) as found:
            async with soon_late(found, within_s):
                if await is_set(begun, within_s):
                    await found.sources[0].outbox.drained()
            await idle(found)
            assert found.pool.revoker.fences == 0
        if begun.is_set():
            return
    raise AssertionError(f"no source began within {PATIENCE_S[-1]} s")


async def test_a_leaseholder_gives_up_at_the_deadline(opening: Any) -> None:
    """Also when the source does not keep it."""
    layout = KvLayout(**SHAPE)
    begun, over = anyio.Event(), anyio.Event()

    async def deaf(source: Source, job: KvJob) -> None:
        begun.set()
        with anyio.CancelScope(shield=True):
            await over.wait()

    for within_s in PATIENCE_S:
        async with streaming(opening, layout, layout, deaf, confirm_s=0.02) as found:
            async with soon_late(found, within_s) as request:
                if not await is_set(begun, within_s):
                    continue
                with pytest.raises(TimeoutError, match=r"passed its deadline; 0 of 12 pieces had arrived"):
                    await request.wait()
            over.set()
            async with await found.pool.lease("all", pages=64):
                assert found.pool.revoker.fences == 1
            return
    raise AssertionError(f"no source began within {PATIENCE_S[-1]} s")


async def test_a_forged_message_changes_nothing(opening: Any) -> None:
    layout = KvLayout(**SHAPE)
    half = anyio.Event()

    async def slow(source: Source, job: KvJob) -> None:
        half.set()
        await anyio.sleep_forever()

    async with streaming(opening, layout, layout, slow) as found:
        lease = await found.pool.lease("request", tokens=16)
        async with lease, found.inbox.request(lease, found.addresses, layout, 16) as request:
            await half.wait()
            home = found.target.address.incarnation
            stopped = KvStopped(target=home, lease=lease.number, clean=True)
            assert found.inbox.handle(12345, stopped) and found.inbox.forged == 1
            assert not request.machine.over
            outbox = found.sources[0].outbox
            assert outbox.handle(12345, KvCancel(target=home, lease=lease.number)) and outbox.forged == 1
            assert outbox.jobs == 1
        await idle(found)


async def test_one_request_is_cancelled_and_the_others_go_on(opening: Any) -> None:
    layout = KvLayout(**SHAPE)
    gate = anyio.Event()

    async def gated(source: Source, job: KvJob) -> None:
        await gate.wait()
        await prefill(source, job)

    async with streaming(opening, layout, layout, gated) as found:
        async with AsyncExitStack() as stack:
            leases = [await stack.enter_async_context(await found.pool.lease(f"r{n}", tokens=8)) for n in range(3)]
            requests = [
                await stack.enter_async_context(found.inbox.request(lease, found.addresses, layout, 8))
                for lease in leases[:2]
            ]
            async with found.inbox.request(leases[2], found.addresses, layout, 8):
                pass
            assert not leases[2].exposed and leases[0].exposed
            gate.set()
            for request in requests:
                await request.wait()
                assert holds(found.pool, request.lease.pages, content_of(layout, 8))
        await idle(found)
