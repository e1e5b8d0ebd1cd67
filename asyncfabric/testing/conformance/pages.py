"""Checks of write_pages: every page goes where its list names, with strides of its own on both sides.

What was written is compared with a model of the target made with plain slices.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from asyncfabric.testing.conformance.setting import (
    MIB,
    POISON,
    FabricFactory,
    Pair,
    assert_bytes,
    carried_key,
    open_pair,
    skip,
)


async def _write_and_compare(
    pair: Pair,
    sources: Sequence[int],
    targets: Sequence[int],
    *,
    page_bytes: int,
    source_stride: int,
    target_stride: int,
    source_offset: int = 0,
    target_offset: int = 0,
    length: int = MIB,
) -> None:
    region, content = await pair.source(length)
    exposed, memory = await pair.poisoned(length)
    counter = pair.target.counter()
    expected = bytearray([POISON]) * length
    for a, b in zip(sources, targets, strict=True):
        start, end = source_offset + a * source_stride, target_offset + b * target_stride
        expected[end : end + page_bytes] = content[start : start + page_bytes]
    result = await pair.writer.write_pages(
        region,
        array("q", sources),
        carried_key(exposed),
        array("q", targets),
        page_bytes=page_bytes,
        source_stride=source_stride,
        target_stride=target_stride,
        source_offset=source_offset,
        target_offset=target_offset,
        imm=counter.imm,
    )
    assert result.bytes == len(sources) * page_bytes
    assert await counter.wait(len(sources)) == len(sources)
    assert_bytes(memory, bytes(expected), f"{len(sources)} pages of {page_bytes}")
    counter.close()
    await region.release()
    await exposed.release()


async def check_pages_with_distinct_strides(factory: FabricFactory) -> None:
    """Strides differ at both ends and exceed the page; offsets shift both lists."""
    async with open_pair(factory) as pair:
        sources = pair.chance.sample(range(60), 50)
        targets = pair.chance.sample(range(90), 50)
        await _write_and_compare(
            pair,
            sources,
            targets,
            page_bytes=4097,
            source_stride=16_384,
            target_stride=11_111,
            source_offset=13,
            target_offset=7,
        )
        await _write_and_compare(pair, sources, targets, page_bytes=1, source_stride=3, target_stride=2)
        await _write_and_compare(pair, [0], [0], page_bytes=MIB, source_stride=MIB, target_stride=MIB)


async def check_pages_longer_than_a_request(factory: FabricFactory) -> None:
    """Pages of several MiB travel in parts where a rail takes less at once; each counts once."""
    async with open_pair(factory) as pair:
        if not all(rail.ordered for rail in pair.writer.rails):
            skip("rails without order take a page in one request or refuse it")
        for page_bytes in (MIB, MIB + 1, 5 * MIB + 3):
            await _write_and_compare(
                pair,
                [2, 0],
                [1, 3],
                page_bytes=page_bytes,
                source_stride=page_bytes + 5,
                target_stride=page_bytes,
                length=22 * MIB,
            )


async def check_pages_with_duplicates(factory: FabricFactory) -> None:
    """One source page may go to many targets, and the same pair may be named twice; each page counts."""
    async with open_pair(factory) as pair:
        await _write_and_compare(
            pair, [5] * 40, list(range(40)), page_bytes=4096, source_stride=4096, target_stride=8192
        )
        twice = [3, 1, 4, 1, 5, 3, 1, 4, 1, 5]
        await _write_and_compare(pair, twice, twice, page_bytes=777, source_stride=1000, target_stride=1000)


async def check_overlapping_source_pages(factory: FabricFactory) -> None:
    """A source stride shorter than the page reads overlapping windows, which reading allows."""
    async with open_pair(factory) as pair:
        await _write_and_compare(
            pair, list(range(100)), list(range(100)), page_bytes=1024, source_stride=100, target_stride=1024
        )


async def check_hundred_thousand_pages(factory: FabricFactory) -> None:
    """100,000 small pages in one call, in random order, complete and exactly counted."""
    async with open_pair(factory) as pair:
        sources = list(range(100_000))
        targets = list(range(100_000))
        pair.chance.shuffle(sources)
        pair.chance.shuffle(targets)
        await _write_and_compare(
            pair, sources, targets, page_bytes=24, source_stride=24, target_stride=24, length=2_400_000
        )


async def check_no_pages(factory: FabricFactory) -> None:
    """Zero pages complete at once with a count of zero."""
    async with open_pair(factory) as pair:
        await _write_and_compare(pair, [], [], page_bytes=4096, source_stride=4096, target_stride=4096)


async def check_many_page_batches_in_flight(factory: FabricFactory) -> None:
    """Layers of pages pushed without waiting, as a prefill does; the receiver knows the sum."""
    async with open_pair(factory) as pair:
        region, content = await pair.source(4 * MIB)
        exposed, memory = await pair.poisoned(4 * MIB)
        key = carried_key(exposed)
        counter = pair.target.counter()
        pages = list(range(64))
        for layer in range(16):
            base = layer * (MIB // 4)
            pair.writer.write_pages(
                region,
                pages,
                key,
                pages,
                page_bytes=4096,
                source_stride=4096,
                target_stride=4096,
                source_offset=base,
                target_offset=base,
                imm=counter.imm,
            )
        assert await counter.wait(16 * 64) == 16 * 64
        assert_bytes(memory, content, "all layers")


async def check_bad_pages(factory: FabricFactory) -> None:
    """Each bad list raises at the call, names the value, and leaves the fabric usable."""
    async with open_pair(factory) as pair:
        region, _ = await pair.source(65_536)
        exposed, memory = await pair.poisoned(65_536)
        key = carried_key(exposed)
        write_pages: Any = pair.writer.write_pages  # what a type checker refuses has to be refused at run time too
        good: dict[str, Any] = {"page_bytes": 4096, "source_stride": 4096, "target_stride": 4096}
        for sources, targets, changed in (
            ([0, 1], [0], {}),
            ([16], [0], {}),
            ([0], [16], {}),
            ([-1], [0], {}),
            ([0], [-1], {}),
            ([1 << 62], [0], {}),
            ([0], [1 << 62], {}),
            ([0], [0], {"page_bytes": -1}),
            ([0], [0], {"page_bytes": 65_537}),
            ([0, 1], [0, 1], {"source_stride": -4096}),
            ([0, 1], [0, 1], {"target_stride": 1 << 63}),
            ([0], [0], {"source_offset": 65_535}),
            ([0], [0], {"target_offset": -1}),
            ([0.5], [0], {}),
            (["0"], [0], {}),
        ):
            try:
                write_pages(region, sources, key, targets, **{**good, **changed})
            except (ValueError, TypeError, OverflowError):
                continue
            raise AssertionError(f"pages {sources} -> {targets} with {changed} were taken")
        assert set(memory) == {POISON}, "nothing of a refused call was written"
        await pair.writer.write_pages(region, [15], key, [15], **good)
