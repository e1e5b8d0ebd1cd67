"""Who waits in a node that streams: named requests, named sources, queues for pages; bare counters give way to them."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from fabrics import settled
from kv_fixture import SHAPE, KvFixture, Source, opening_of, prefill, streaming

from asyncfabric import Waiting
from asyncfabric.kv import KvJob, KvLayout, waiting
from asyncfabric.testing import FakeNetwork

pytestmark = pytest.mark.anyio
LAYOUT = KvLayout(**SHAPE, context_bytes=64)


def lines_of(found: KvFixture) -> list[Waiting]:
    return waiting(found.target, [found.pool], [found.inbox])


async def request_all(found: KvFixture, owner: str, **more: Any) -> None:
    async with (
        await found.pool.lease(owner, tokens=23, context=True) as lease,
        found.inbox.request(lease, found.addresses, found.layout, 23, **more) as request,
    ):
        await request.wait()


class Half:
    """A source that streams one layer and stops there until it is ordered to go on."""

    def __init__(self) -> None:
        self.go = anyio.Event()

    async def __call__(self, source: Source, job: KvJob) -> None:
        async with (
            await source.pool.lease("prefill", tokens=job.offer.tokens, context=True) as lease,
            job.open_stream(lease.pages) as stream,
        ):
            stream.push(0, job.offer.tokens)
            await self.go.wait()
            for layer in (1, 2):
                stream.push(layer, job.offer.tokens)
            await stream.finish(lease.context)


@pytest.mark.parametrize("engine", ["fake", "native"])
async def test_a_hung_stream_names_its_request_its_source_and_what_is_missing(engine: str) -> None:
    half = Half()
    async with streaming(opening_of(engine), LAYOUT, LAYOUT, half) as found, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: request_all(found, "request-7", names=["prefill-1"]))
        with anyio.fail_after(60):
            while not (lines := lines_of(found)) or lines[0].have < 6:
                await anyio.lowlevel.checkpoint()
        (line,) = lines
        assert line.what.startswith("request-7, lease ")
        assert line.waits_for == f"arrivals of imm {line.detail['imm']}"
        assert (line.have, line.need) == (6, 3 * 6 + 1)  # one layer of 6 pages of three, and the context
        assert line.missing_from == ("prefill-1",)
        assert line.since > 0
        source = found.sources[0]
        with anyio.fail_after(60):  # its writes stand beside the job until it has read their completions
            while len(jobs := waiting(source.fabric, [source.pool], [source.outbox])) > 1:
                await anyio.lowlevel.checkpoint()
        (job,) = jobs
        assert job.what.endswith(f"of fabric {found.target.address.incarnation:016x}")
        assert (job.waits_for, job.have, job.need) == ("pieces to be computed", 6, 18)
        assert job.detail["lease"] == line.detail["lease"]
        half.go.set()
    assert lines_of(found) == []


async def test_a_source_without_a_name_is_its_fabric_and_layers_have_one_line() -> None:
    half = Half()
    async with streaming(opening_of("fake"), LAYOUT, LAYOUT, half) as found, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: request_all(found, "r", per_layer=True))
        await settled()
        (line,) = lines_of(found)
        assert line.waits_for == "arrivals of 4 imms"
        assert line.missing_from == (f"fabric {found.addresses[0].incarnation:016x}",)
        half.go.set()


async def test_names_come_one_for_each_rank() -> None:
    async with streaming(opening_of("fake"), LAYOUT, LAYOUT) as found:
        with pytest.raises(ValueError, match="1 ranks, got 2 names"):
            await request_all(found, "r", names=["a", "b"])


async def test_who_waits_for_pages_sees_who_holds_them() -> None:
    async with streaming(opening_of("fake"), LAYOUT, LAYOUT, pages=8) as found, anyio.create_task_group() as tasks:
        first = found.pool.lease_nowait("the first", pages=7)
        tasks.start_soon(lambda: request_all(found, "the second"))
        await settled()
        (line,) = lines_of(found)
        assert (line.what, line.waits_for, line.have, line.need) == ("the second", "pages", 1, 6)
        assert line.missing_from == ("the first (7 pages)",)
        first.release()


async def test_a_cancelled_request_waits_for_the_word_of_its_source() -> None:
    network = FakeNetwork()
    half = Half()
    async with streaming(lambda: opening(network), LAYOUT, LAYOUT, half) as found, anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()

        async def leave_early() -> None:
            with scope:
                await request_all(found, "r", names=["prefill-1"])

        tasks.start_soon(leave_early)
        await settled()
        network.hold = True
        scope.cancel()
        await settled()
        (line,) = [one for one in lines_of(found) if "confirm" in one.waits_for]
        assert (line.have, line.need, line.missing_from) == (0, 1, ("prefill-1",))
        network.release()


def opening(network: FakeNetwork) -> Any:
    from fabrics import open_fake

    return open_fake(network)


async def test_what_has_arrived_waits_for_nobody_even_before_its_scope_is_left() -> None:
    async with (
        streaming(opening_of("fake"), LAYOUT, LAYOUT, prefill) as found,
        await found.pool.lease("r", tokens=23, context=True) as lease,
        found.inbox.request(lease, found.addresses, found.layout, 23) as request,
    ):
        await request.wait()
        assert lines_of(found) == []
