"""Ring 4: what EFA demands of the engine, without the hardware: a rail in any order, one immediate per page.

The fault provider shuffles; `eager_posts` and `posts_per_pass` are the pace of the efa profile. Counts stay logical
(INV-1): n pages count n, none before its bytes are there, however the immediates arrive.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

import anyio
import pytest

import asyncfabric as af

PAGES = 300
PAGE_BYTES = 96
LOCAL = "fault+local?reorder=64&seed={seed}"
PACED = "fault+tcp?reorder=64&seed={seed}&eager_posts=1&posts_per_pass=32"


@functools.cache
def _missing(rail: str) -> str:
    async def attempt() -> None:
        async with af.open_fabric(af.FabricConfig(rails=(rail,))):
            pass

    try:
        anyio.run(attempt, backend="trio")
    except af.DeviceError as error:
        return str(error)
    return ""


def _run(rail: str, check: Callable[[], Awaitable[None]]) -> None:
    if reason := _missing(rail):
        pytest.skip(f"{rail} cannot be opened here: {reason}")

    async def bounded() -> None:
        with anyio.fail_after(60):
            await check()

    anyio.run(bounded, backend="trio")


@pytest.mark.parametrize("rails", [1, 2])
@pytest.mark.parametrize("rail", [LOCAL, PACED], ids=["local", "paced-tcp"])
def test_each_page_carries_its_own_immediate(rail: str, rails: int) -> None:
    specs = tuple(rail.format(seed=n + 1) for n in range(rails))

    async def check() -> None:
        config = af.FabricConfig(rails=specs)
        async with af.open_fabric(config) as writer, af.open_fabric(config) as target:
            assert not any(info.ordered for info in writer.rails)
            memory = bytearray(PAGES * PAGE_BYTES)
            exposed = await target.register(memory, access="write")
            source = await writer.register(bytearray(b"\x01" * (PAGES * PAGE_BYTES)), access="local")
            key = af.RegionKey.from_bytes(bytes(exposed.key()))
            counter = target.counter()
            before = writer.statistics()
            numbers = list(range(PAGES))
            transfer = writer.write_pages(
                source,
                numbers,
                key,
                numbers[::-1],
                page_bytes=PAGE_BYTES,
                source_stride=PAGE_BYTES,
                target_stride=PAGE_BYTES,
                imm=counter.imm,
            )
            progress: list[int] = []
            async for value in counter:
                whole = sum(all(memory[n * PAGE_BYTES : (n + 1) * PAGE_BYTES]) for n in numbers)
                assert value <= whole, f"{value} pages are counted and {whole} are there"
                progress.append(value)
                if value >= PAGES:
                    break
            assert (await transfer).bytes == len(memory)
            assert progress[-1] == PAGES
            assert writer.statistics().immediates_sent - before.immediates_sent == PAGES
            await writer.signal(await writer.connect(target.address), counter.imm)
            assert await counter.wait(PAGES + 1) == PAGES + 1, "nothing was counted twice"

    _run(specs[0], check)


def test_an_ordered_rail_needs_one_immediate_for_the_same_pages() -> None:
    async def check() -> None:
        config = af.FabricConfig(rails=("local",))
        async with af.open_fabric(config) as writer, af.open_fabric(config) as target:
            exposed = await target.register(bytearray(PAGES * PAGE_BYTES), access="write")
            source = await writer.register(bytearray(PAGES * PAGE_BYTES), access="local")
            counter = target.counter()
            before = writer.statistics()
            numbers = list(range(PAGES))
            await writer.write_pages(
                source,
                numbers,
                af.RegionKey.from_bytes(bytes(exposed.key())),
                numbers[::-1],
                page_bytes=PAGE_BYTES,
                source_stride=PAGE_BYTES,
                target_stride=PAGE_BYTES,
                imm=counter.imm,
            )
            assert await counter.wait(PAGES) == PAGES
            assert writer.statistics().immediates_sent - before.immediates_sent == 1

    _run("local", check)
