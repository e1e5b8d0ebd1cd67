"""What a push posts and costs: submissions, steps of Python, layers in any order; and how a stream with them ends."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import anyio
import pytest
from fabrics import open_fake
from kv_fixture import SHAPE, content_of, fill, holds

import asyncfabric as af
from asyncfabric.kv import KvLayout, KvLease, KvPool, KvStream, open_pool, open_stream
from asyncfabric.testing import FakeNetwork

pytestmark = pytest.mark.anyio
LAYOUT = KvLayout(**SHAPE)
TOKENS = 23
MOST_CALLS = 24
"""Calls of functions of the library that a push of one batch may make, those of its engine left out."""


@dataclass
class Ends:
    """Two pools with a lease each; the source's pages hold what the target is to get."""

    network: FakeNetwork
    source: KvPool
    held: KvLease
    lease: KvLease

    @asynccontextmanager
    async def stream(self, *, per_layer: bool = False) -> AsyncIterator[KvStream]:
        offer = await self.lease.offer(self.source.layout, TOKENS, per_layer=per_layer)
        async with open_stream(self.source.fabric, self.source, offer, self.held.pages) as stream:
            yield stream

    @property
    def submissions(self) -> int:
        return self.source.fabric.statistics().counters["ops_submitted"]

    def arrived_whole(self) -> bool:
        return self.lease.arrived == self.lease.expected and holds(
            self.lease.pool, self.lease.pages, content_of(self.source.layout, TOKENS)
        )


@asynccontextmanager
async def ends(
    source: KvLayout = LAYOUT, target: KvLayout = LAYOUT, config: af.FabricConfig | None = None
) -> AsyncIterator[Ends]:
    network = FakeNetwork()
    async with (
        open_fake(network) as away,
        open_fake(network, config) as home,
        open_pool(away, target, pages=16, seed=1) as there,
        open_pool(home, source, pages=16, seed=2) as here,
        await here.lease("source", tokens=TOKENS) as held,
        await there.lease("target", tokens=TOKENS) as lease,
    ):
        whole = content_of(source, TOKENS)
        for layer in range(source.layers):
            fill(here, held.pages, whole, layer)
        yield Ends(network, here, held, lease)


@pytest.mark.parametrize(("per_layer", "submissions"), [(False, 1), (True, 3)])
async def test_layers_pushed_together_go_in_one_submission_for_each_counter(per_layer: bool, submissions: int) -> None:
    async with ends() as pair, pair.stream(per_layer=per_layer) as stream:
        before = pair.submissions
        assert stream.push_layers(range(3), TOKENS) == 3 * 6
        assert pair.submissions - before == submissions
        assert stream.push_layers(range(3), TOKENS) == 0
        await stream.finish()
        assert stream.pieces == pair.lease.expected and stream.bytes == 18 * LAYOUT.page_bytes
        assert pair.arrived_whole()


async def test_layers_that_were_pushed_unequally_far_are_each_brought_up_once() -> None:
    async with ends() as pair, pair.stream() as stream:
        stream.push(1, 9)
        assert stream.push_layers([2, 0, 2], 12) == 2 * 3
        assert stream.push_layers(range(3), 17) == 2 * 1 + 2
        assert stream.push_layers(range(3), TOKENS) == 3 * 2
        await stream.finish()
        assert pair.arrived_whole()


@pytest.mark.parametrize("order", ["HND", "NHD"])
async def test_layers_pushed_together_between_unlike_layouts(order: Any) -> None:
    """Other page sizes, and two source ranks that take turns by layer for the head that both keep."""
    shape: dict[str, Any] = SHAPE | {"kv_heads": 1, "order": order, "layers": 4}
    source, target = KvLayout(**shape, tp_size=2), KvLayout(**(shape | {"page_tokens": 6}))
    async with ends(source, target) as pair, pair.stream() as stream:
        for ready in (5, 6, 20, TOKENS):
            stream.push_layers(range(4), ready)
        await stream.finish()
        assert stream.pieces * 2 == pair.lease.expected == pair.lease.arrived * 2
        pool, whole = pair.lease.pool, content_of(source, TOKENS)
        for layer in range(4):
            page = pool.page(layer, int(pair.lease.pages[0]))
            assert page.any() == (layer % 2 == 0), "the other rank writes each second layer"
        assert whole.any()


async def test_of_layers_that_do_not_exist_nothing_is_posted() -> None:
    async with ends() as pair, pair.stream() as stream:
        before = pair.submissions
        with pytest.raises(ValueError, match=r"layer must be in 0..2, got 3"):
            stream.push_layers(range(4), TOKENS)
        with pytest.raises(ValueError, match=r"tokens_ready must be in 0..23, got 24"):
            stream.push_layers(range(3), 24)
        assert pair.submissions == before and stream.pieces == 0
    with pytest.raises(af.ClosedError):
        stream.push_layers(range(3), TOKENS)


async def test_what_finds_no_room_is_posted_later_in_its_order() -> None:
    """One op at a time fits: `flush` posts the rest as room comes, and every piece goes once."""
    async with (
        ends(config=af.FabricConfig(max_ops=1)) as pair,
        pair.stream() as stream,
        anyio.create_task_group() as tasks,
    ):
        pair.network.hold = True
        for layer in range(3):
            stream.push(layer, TOKENS)
        assert stream.pieces == 6 and stream.progress().queued == 2
        tasks.start_soon(release_soon, pair.network)
        await stream.finish()
        assert stream.progress().queued == 0 and pair.arrived_whole()


async def test_when_each_submission_was_under_way_is_known_after_the_end() -> None:
    async with ends() as pair:
        async with pair.stream() as stream:
            times = [time.monotonic_ns()]
            for layer in range(3):
                stream.push(layer, TOKENS)
                times.append(time.monotonic_ns())
            assert stream.writes == ()
            await stream.finish()
            assert len(stream.writes) == 3
        writes = stream.writes
        for write, earliest, latest in zip(writes, times, times[1:], strict=False):
            assert earliest <= write.submitted_ns <= latest <= time.monotonic_ns()
            assert write.submitted_ns <= write.completed_ns <= time.monotonic_ns()
            assert write.bytes == 6 * LAYOUT.page_bytes


async def test_the_times_of_a_stream_that_was_left_early_are_those_of_what_was_posted() -> None:
    async with ends() as pair:
        async with pair.stream() as stream:
            stream.push(1, TOKENS)
        assert [write.bytes for write in stream.writes] in ([6 * LAYOUT.page_bytes], [0])


async def test_leaving_with_layers_that_were_pushed_together_drains_them() -> None:
    """INV-2: nothing of the one submission is on its way when the block is left, and the source pages are free."""
    async with ends() as pair:
        async with anyio.create_task_group() as tasks:
            async with pair.stream() as stream:
                pair.network.hold = True
                stream.push_layers(range(3), TOKENS)
                assert pair.network.in_flight > 0
                tasks.start_soon(release_soon, pair.network)
            assert stream.ended and pair.network.in_flight == 0
        with pytest.raises(af.ClosedError):
            stream.push(0, TOKENS)


async def release_soon(network: FakeNetwork) -> None:
    await anyio.lowlevel.checkpoint()
    network.release()


async def test_finish_raises_the_first_failure_when_everything_has_ended() -> None:
    async with ends() as pair:
        raised: list[Exception] = []

        async def finish(stream: KvStream) -> None:
            try:
                await stream.finish()
            except af.FabricError as error:
                raised.append(error)

        async with pair.stream() as stream, anyio.create_task_group() as tasks:
            pair.network.fail_next()
            stream.push(0, TOKENS)
            pair.network.hold = True
            stream.push_layers((1, 2), TOKENS)
            tasks.start_soon(finish, stream)
            await anyio.wait_all_tasks_blocked()
            assert not raised, "the writes of other layers still read the source's pages"
            pair.network.release()
        assert isinstance(raised[0], af.TransferError) and not stream.finished and not stream.clean


def calls_of(push: Any, *arguments: Any) -> int:
    """Return how many functions of kv and of the API a call runs."""
    calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        name = frame.f_code.co_filename
        calls += event == "call" and ("/asyncfabric/kv/" in name or "/asyncfabric/_api/" in name)

    sys.setprofile(count)
    try:
        push(*arguments)
    finally:
        sys.setprofile(None)
    return calls


async def test_the_steps_of_a_push_do_not_grow_with_pages_or_layers() -> None:
    """The layers of a chunk share its lists, and layers pushed together take the steps of one."""
    async with ends() as pair, pair.stream() as stream:
        stream.push(0, 4)  # opens the key
        few = calls_of(stream.push, 0, 8)
        many = calls_of(stream.push, 1, TOKENS)
        shared = calls_of(stream.push, 2, TOKENS)
        assert few == many > shared, (few, many, shared)
        assert many <= MOST_CALLS, many
    async with ends() as pair, pair.stream() as stream:
        stream.push_layers(range(3), 4)
        few = calls_of(stream.push_layers, range(3), 8)
        many = calls_of(stream.push_layers, range(3), TOKENS)
        assert few == many <= MOST_CALLS + 4, (few, many)
        await stream.finish()
        assert pair.arrived_whole()
