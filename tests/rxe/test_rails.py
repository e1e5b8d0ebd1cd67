"""Ring 6: rails of one, two and three devices on either side, equal in number or not: bytes and counts are the same."""

from __future__ import annotations

from functools import partial

import anyio
import pytest
from extent import cases
from links import far, near
from load import open_load

import asyncfabric as af

PIECE = 40_001  # not a multiple of anything, and wide enough to be striped over three rails


@pytest.mark.parametrize(
    ("ours", "theirs"), cases([(1, 3), (2, 2), (3, 1), (3, 2)], [(1, 1), (1, 2), (2, 1), (2, 3), (3, 3)])
)
def test_rails_of_any_number(ours: int, theirs: int) -> None:
    async def check() -> None:
        with anyio.fail_after(60):
            async with open_load(near(ours), far(theirs), slots=12, piece=PIECE) as load:
                await load.run(10)
                assert not load.failed
                load.check_bytes()
                await load.check_counts()
                assert {rail for rails in load.rails.values() for rail in rails} == set(range(ours))
                numbers = list(range(100))
                shape = {"page_bytes": 333, "source_stride": 400, "target_stride": 333}
                await load.writer.write_pages(load.source, numbers, load.key, numbers, imm=load.counter.imm, **shape)
                assert await load.counter.wait(110) == 110
                for page in numbers:
                    assert load.memory[page * 333 :][:333] == load.content[page * 400 :][:333], f"page {page}"
                await load.writer.signal(await load.writer.connect(load.target.address), load.counter.imm)
                assert await load.counter.wait(111) == 111

    anyio.run(check, backend="trio")


def test_both_directions_at_once() -> None:
    """Two rails there, three back, both loaded."""

    async def check() -> None:
        with anyio.fail_after(60):
            async with (
                open_load(near(2), far(3), slots=40, piece=9_001) as there,
                open_load(far(3), near(2), slots=40, piece=9_001) as back,
            ):
                both = (there, back)
                async with anyio.create_task_group() as tasks:
                    for load in both:
                        tasks.start_soon(partial(load.run, 40))
                for load in both:
                    assert not load.failed
                    load.check_bytes()
                    assert await load.counter.wait(40) == 40

    anyio.run(check, backend="trio")


def test_pages_cost_one_immediate_per_rail() -> None:
    """A batch on an ordered rail is counted by its last request: a thousand pages are one immediate per rail."""

    async def check() -> None:
        with anyio.fail_after(60):
            async with open_load(near(2), far(2), slots=1, piece=4096 * 2000) as load:
                before = load.writer.statistics()
                numbers = list(range(0, 2000, 2))  # neighbours do not touch, so that none can be joined
                shape = {"page_bytes": 4096, "source_stride": 4096, "target_stride": 4096}
                await load.writer.write_pages(load.source, numbers, load.key, numbers, imm=load.counter.imm, **shape)
                assert await load.counter.wait(1000) == 1000
                after = load.writer.statistics()
                assert after.immediates_sent - before.immediates_sent <= 2
                assert after.work_requests - before.work_requests < 1010

    anyio.run(check, backend="trio")


def test_devices_without_immediates_are_turned_down_by_name() -> None:
    """iWARP is such a transport: it could move bytes and count nothing."""

    async def attempt() -> None:
        async with af.open_fabric(af.FabricConfig(rails=("fault+verbs:rxe0?no_immediates=1",))):
            pass

    with pytest.raises(af.DeviceError, match=r"verbs device 'rxe0' has no writes with immediate"):
        anyio.run(attempt, backend="trio")
