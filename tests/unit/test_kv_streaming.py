"""Streams between pools of fabrics in one process, on the fake engine and on the native one, under both event loops."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np
import pytest
from fabrics import open_fake

import asyncfabric as af
from asyncfabric.kv import (
    FabricMessenger,
    KvInbox,
    KvJob,
    KvLayout,
    KvOutbox,
    KvPool,
    deliver,
    open_inbox,
    open_outbox,
    open_pool,
)
from asyncfabric.testing import FakeNetwork

pytestmark = pytest.mark.anyio

SHAPE: dict[str, Any] = {"layers": 3, "kv_heads": 2, "head_dim": 4, "page_tokens": 4, "dtype": "float16"}
PATIENCE_S = 20.0


@dataclass
class Source:
    fabric: af.Fabric
    pool: KvPool
    outbox: KvOutbox


@dataclass
class Scene:
    """One leaseholder and the ranks of a source; `handler` is what the ranks do with an offer."""

    target: af.Fabric
    pool: KvPool
    inbox: KvInbox
    sources: list[Source] = field(default_factory=list)
    messengers: list[FabricMessenger] = field(default_factory=list)

    @property
    def addresses(self) -> list[af.FabricAddress]:
        return [source.fabric.address for source in self.sources]

    @property
    def layout(self) -> KvLayout:
        return self.sources[0].pool.layout


def content_of(layout: KvLayout, tokens: int) -> np.ndarray[Any, Any]:
    """The whole model's cache: [layer][plane][head][token][bytes]."""
    shape = (layout.layers, layout.planes, layout.kv_heads, tokens, layout.head_dim * layout.itemsize)
    return np.random.default_rng(3).integers(1, 256, size=shape, dtype=np.uint8)


def rows(layout: KvLayout, page: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A page as [plane][head][token][bytes]."""
    row = layout.head_dim * layout.itemsize
    if layout.order == "NHD":
        return page.reshape(2, layout.page_tokens, layout.local_heads, row).swapaxes(1, 2)
    return page.reshape(layout.planes, layout.local_heads, layout.page_tokens, row)


def fill(pool: KvPool, pages: Any, whole: np.ndarray[Any, Any], layer: int) -> None:
    layout = pool.layout
    for token in range(whole.shape[3]):
        page, slot = divmod(token, layout.page_tokens)
        view = rows(layout, pool.page(layer, int(pages[page])))
        view[:, :, slot] = whole[layer, :, layout.heads.start : layout.heads.stop, token]


def holds(pool: KvPool, pages: Any, whole: np.ndarray[Any, Any]) -> bool:
    layout = pool.layout
    for layer in range(layout.layers):
        for token in range(whole.shape[3]):
            page, slot = divmod(token, layout.page_tokens)
            view = rows(layout, pool.page(layer, int(pages[page])))
            if not np.array_equal(view[:, :, slot], whole[layer, :, layout.heads.start : layout.heads.stop, token]):
                return False
    return True


async def prefill(source: Source, job: KvJob, chunk: int = 5) -> None:
    """Compute the model's cache chunk by chunk, pushing each layer, then the context."""
    tokens, pool = job.offer.tokens, source.pool
    whole = content_of(pool.layout, tokens)
    context = bool(pool.layout.context_bytes)
    async with (
        await pool.lease("prefill", tokens=tokens, context=context) as lease,
        job.open_stream(lease.pages) as stream,
    ):
        for end in [*range(chunk, tokens, chunk), tokens]:
            for layer in range(pool.layout.layers):
                fill(pool, lease.pages, whole, layer)
                stream.push(layer, end)
            await anyio.lowlevel.checkpoint()
        if context:
            lease.context.memory[:] = bytes([7]) * pool.layout.context_bytes
        await stream.finish(lease.context if context else None)


@pytest.fixture(params=["fake", "native"])
def opening(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """How to open fabrics of one network."""
    if request.param == "fake":
        network = FakeNetwork()
        return lambda: open_fake(network)
    pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")
    return af.open_fabric


@asynccontextmanager
async def scene(
    opening: Callable[[], Any],
    source_layout: KvLayout,
    target_layout: KvLayout,
    handler: Any = prefill,
    confirm_s: float = 5.0,
    pages: int = 64,
) -> AsyncIterator[Scene]:
    contexts = 4 if target_layout.context_bytes else 0
    with anyio.fail_after(PATIENCE_S):
        async with AsyncExitStack() as stack:

            async def pool_of(layout: KvLayout, seed: int) -> tuple[af.Fabric, KvPool]:
                fabric = await stack.enter_async_context(opening())
                opened = open_pool(fabric, layout, pages=pages, contexts=contexts, seed=seed)
                return fabric, await stack.enter_async_context(opened)

            target, pool = await pool_of(target_layout, 1)
            homes = [await pool_of(source_layout.at_rank(rank), rank + 2) for rank in range(source_layout.tp_size)]
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(tasks.cancel_scope.cancel)
            messenger = FabricMessenger(target)
            inbox = await stack.enter_async_context(open_inbox(target, pool, messenger, confirm_s=confirm_s))
            tasks.start_soon(deliver, messenger, [inbox])
            found = Scene(target, pool, inbox, messengers=[messenger])
            for fabric, own in homes:
                post = FabricMessenger(fabric)
                found.messengers.append(post)
                source = Source(fabric, own, None)  # type: ignore[arg-type]  # known in a moment

                async def serve(job: KvJob, source: Source = source) -> None:
                    await handler(source, job)

                source.outbox = await stack.enter_async_context(open_outbox(fabric, own, post, serve))
                tasks.start_soon(deliver, post, [source.outbox])
                found.sources.append(source)
            yield found


async def idle(found: Scene) -> None:
    """Return when no source serves anything and every page is back."""
    for source in found.sources:
        await source.outbox.drained()
    for pool in (found.pool, *(source.pool for source in found.sources)):
        report = pool.report()
        assert report.free == report.pages and report.quarantined == 0, report


@pytest.mark.parametrize("per_layer", [False, True])
async def test_a_request_arrives_whole(opening: Any, per_layer: bool) -> None:
    layout = KvLayout(**SHAPE, context_bytes=64)
    async with scene(opening, layout, layout) as found:
        async with (
            await found.pool.lease("request", tokens=30, context=True) as lease,
            found.inbox.request(
                lease, found.addresses, found.layout, 23, per_layer=per_layer, body=b"prompt"
            ) as request,
        ):
            if per_layer:
                for layer in range(3):
                    await request.wait_layer(layer)
            else:
                with pytest.raises(ValueError, match="per_layer"):
                    await request.wait_layer(0)
            await request.wait()
            assert not lease.exposed and lease.arrived == lease.expected == 3 * 6 + 1
            assert holds(found.pool, lease.pages, content_of(layout, 23))
            assert bytes(lease.context.memory) == bytes([7]) * 64
        await idle(found)
        assert found.pool.warden.fences == 0


@pytest.mark.slow
@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("target_size", [1, 2, 4, 8])
@pytest.mark.parametrize("source_size", [1, 2, 4, 8])
async def test_every_pair_of_tensor_parallelisms(opening: Any, source_size: int, target_size: int, order: Any) -> None:
    """Bit for bit through a fabric, with grouped queries: 4 heads, so that 8 ranks keep each head twice."""
    shape = SHAPE | {"kv_heads": 4, "order": order}
    source = KvLayout(**shape, tp_size=source_size)
    ranks = (0, target_size - 1) if target_size > 1 else (0,)
    for rank in ranks:
        target = KvLayout(**(shape | {"page_tokens": 8 if rank else 4}), tp_size=target_size, tp_rank=rank)
        async with scene(opening, source, target) as found:
            async with await found.pool.lease("request", tokens=21) as lease:
                async with found.inbox.request(lease, found.addresses, source, 21, rotation=rank) as request:
                    await request.wait()
                assert holds(found.pool, lease.pages, content_of(target, 21))
            await idle(found)


async def test_mla_is_sent_once_by_turns(opening: Any) -> None:
    shape = SHAPE | {"kv_heads": 1, "order": "MLA", "head_dim": 9}
    source, target = KvLayout(**shape, tp_size=2), KvLayout(**shape, tp_size=4, tp_rank=3)
    async with scene(opening, source, target) as found:
        async with await found.pool.lease("request", tokens=9) as lease:
            async with found.inbox.request(lease, found.addresses, source, 9) as request:
                await request.wait()
            assert lease.arrived == 3 * 3
            assert holds(found.pool, lease.pages, content_of(target, 9))
        await idle(found)


async def test_cancelled_in_the_middle(opening: Any) -> None:
    """Leaving the request tells the source, which drains and confirms; the pages are free at once, without a fence."""
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

    async with scene(opening, layout, layout, slow) as found:
        async with await found.pool.lease("request", tokens=16) as lease:
            async with found.inbox.request(lease, found.addresses, layout, 16):
                await half.wait()
            assert stopped.is_set() and not lease.exposed
        await idle(found)
        assert found.pool.warden.fences == 0


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

    async with scene(opening, layout, layout, deaf, confirm_s=0.02, pages=8) as found:
        lease = await found.pool.lease("request", pages=8)
        async with found.inbox.request(lease, found.addresses, layout, 16):
            await posted.wait()
        assert lease.exposed
        assert not lease.release()
        again = await found.pool.lease("next", pages=8)
        assert found.pool.warden.fences == 1
        for layer in range(3):
            for page in range(8):
                found.pool.page(layer, page)[:] = 0x11
        fenced.set()
        await found.sources[0].outbox.drained()
        assert isinstance(late[0], af.StaleKeyError | af.PeerError), late
        assert (np.frombuffer(found.pool.region.memory, np.uint8) == 0x11).all(), "written after the fence"
        again.release()
        await idle(found)


async def test_a_source_that_fails_says_why(opening: Any) -> None:
    layout = KvLayout(**SHAPE)

    async def failing(source: Source, job: KvJob) -> None:
        async with await source.pool.lease("prefill", tokens=16) as lease, job.open_stream(lease.pages) as stream:
            stream.push(0, 8)
            raise RuntimeError("the model is out of memory")

    async with scene(opening, layout, layout, failing) as found:
        lease = await found.pool.lease("request", tokens=16)
        async with lease, found.inbox.request(lease, found.addresses, layout, 16) as request:
            with pytest.raises(af.TransferError, match="out of memory"):
                await request.wait()
            assert not lease.exposed
        assert found.sources[0].outbox.failures == 1
        await idle(found)


@pytest.mark.parametrize(("field_name", "other"), [("model", "another"), ("dtype", "float32"), ("order", "NHD")])
async def test_a_layout_that_does_not_fit_is_refused_by_its_field(opening: Any, field_name: str, other: str) -> None:
    """At home when the source told its layout, by the source when that was not the truth."""
    layout = KvLayout(**SHAPE)
    different = KvLayout(**(SHAPE | {field_name: other}))
    async with scene(opening, different, layout) as found:
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


async def test_a_source_stops_by_itself_at_the_deadline(opening: Any) -> None:
    layout = KvLayout(**SHAPE)

    async def never(source: Source, job: KvJob) -> None:
        await anyio.sleep_forever()

    async with scene(opening, layout, layout, never) as found:
        lease = await found.pool.lease("request", tokens=16, deadline=anyio.current_time() + 0.05)
        async with lease, found.inbox.request(lease, found.addresses, layout, 16):
            await found.sources[0].outbox.drained()
        await idle(found)
        assert found.pool.warden.fences == 0


async def test_a_leaseholder_gives_up_at_the_deadline(opening: Any) -> None:
    """Also when the source does not keep it."""
    layout = KvLayout(**SHAPE)
    begun, over = anyio.Event(), anyio.Event()

    async def deaf(source: Source, job: KvJob) -> None:
        begun.set()
        with anyio.CancelScope(shield=True):
            await over.wait()

    async with scene(opening, layout, layout, deaf, confirm_s=0.02) as found:
        lease = await found.pool.lease("request", tokens=16, deadline=anyio.current_time() + 0.1)
        async with lease, found.inbox.request(lease, found.addresses, layout, 16) as request:
            await begun.wait()
            with pytest.raises(TimeoutError, match=r"passed its deadline; 0 of 12 pieces had arrived"):
                await request.wait()
        over.set()
        async with await found.pool.lease("all", pages=64):
            assert found.pool.warden.fences == 1


async def test_offers_longer_than_a_message_of_the_fabric(opening: Any) -> None:
    """3,000 pages need 12 KB in the offer; garbage between its parts is counted and dropped."""
    layout = KvLayout(layers=1, kv_heads=1, head_dim=1, page_tokens=1, dtype="uint8")
    async with scene(opening, layout, layout, pages=3000) as found:
        source = found.sources[0]
        peer = await found.target.connect(source.fabric.address)
        one_part = b"kv" + bytes(10) + b"\0\1"
        for garbage in (b"", b"x" * 100, b"kv" + bytes(12), b"kv" + bytes(10) + b"\xff\xff", one_part + b"?"):
            await found.target.send(peer, garbage)
        lease = await found.pool.lease("request", pages=3000)
        async with lease, found.inbox.request(lease, found.addresses, layout, 3000) as request:
            await request.wait()
            assert holds(found.pool, lease.pages, content_of(layout, 3000))
        await idle(found)
        assert found.messengers[1].refused == 5


async def test_a_forged_message_changes_nothing(opening: Any) -> None:
    from asyncfabric.kv import KvCancel, KvStopped

    layout = KvLayout(**SHAPE)
    half = anyio.Event()

    async def slow(source: Source, job: KvJob) -> None:
        half.set()
        await anyio.sleep_forever()

    async with scene(opening, layout, layout, slow) as found:
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

    async with scene(opening, layout, layout, gated) as found:
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
