"""Checks of one-sided reads, of ranges and of pages, where the rails have them, and of a clear refusal where not."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import asyncfabric as af
from asyncfabric.testing.conformance.setting import (
    MIB,
    POISON,
    FabricFactory,
    Pair,
    assert_bytes,
    awaiting,
    cancelled_after,
    carried_key,
    open_pair,
    skip,
    view_of,
)


async def check_reads(factory: FabricFactory) -> None:
    """A read of each size brings the bytes and touches nothing else at either end."""
    async with open_pair(factory) as pair:
        _needs_reads(pair, factory)
        region, content = await pair.source(MIB + 1)
        exposed, memory = await pair.poisoned(MIB + 1)
        remote = pair.chance.randbytes(MIB + 1)
        memory[:] = remote
        key = carried_key(exposed, access="read")
        await pair.peer()
        for size in (0, 1, 4095, 4097, 16_385, 131_073, MIB + 1):
            view_of(region)[:] = content
            start = pair.chance.randrange(MIB + 2 - size)
            result = await pair.writer.read(key, start, region[0:size])
            assert result.bytes == size
            assert_bytes(view_of(region)[:size], remote[start : start + size], f"a read of {size}")
            assert_bytes(view_of(region)[size:], content[size:], f"beyond a read of {size}")
        assert_bytes(memory, remote, "what was read")


async def check_read_pages(factory: FabricFactory) -> None:
    """Each page comes from where its list names to where the other one names, and the bytes between stay."""
    async with open_pair(factory) as pair:
        _needs_reads(pair, factory)
        sources, targets = pair.chance.sample(range(60), 50), pair.chance.sample(range(90), 50)
        await _read_and_compare(pair, sources, targets, 4097, (16_384, 11_111), (13, 7))
        await _read_and_compare(pair, sources, targets, 1, (3, 2))
        await _read_and_compare(pair, [0], [0], MIB, (MIB, MIB))
        await _read_and_compare(pair, [], [], 4096, (4096, 4096))
        await _read_and_compare(pair, [5] * 40, list(range(40)), 4096, (4096, 8192))
        await _read_and_compare(pair, list(range(100)), list(range(100)), 1024, (100, 1024))
        run = list(range(200))  # next to each other on both sides
        await _read_and_compare(pair, run, run, 4096, (4096, 4096))


async def check_read_pages_longer_than_a_request(factory: FabricFactory) -> None:
    """Pages of several MiB are read in parts where a rail takes less at once."""
    async with open_pair(factory) as pair:
        _needs_reads(pair, factory)
        for page_bytes in (MIB + 1, 5 * MIB + 3):
            await _read_and_compare(pair, [2, 0], [1, 3], page_bytes, (page_bytes + 5, page_bytes), length=22 * MIB)


async def check_many_read_pages(factory: FabricFactory) -> None:
    """5,000 small pages in one call, in random order."""
    async with open_pair(factory) as pair:
        _needs_reads(pair, factory)
        sources, targets = list(range(5_000)), list(range(5_000))
        pair.chance.shuffle(sources)
        pair.chance.shuffle(targets)
        await _read_and_compare(pair, sources, targets, 24, (24, 24), length=120_000)


async def check_bad_read_pages(factory: FabricFactory) -> None:
    """Each bad list raises at the call and writes nothing; so does a key without the right to read."""
    async with open_pair(factory) as pair:
        region, content = await pair.source(65_536)
        exposed, _ = await pair.poisoned(131_072)
        key = carried_key(exposed, access="read")
        read_pages: Any = pair.writer.read_pages
        for sources, targets, where, changed in (
            ([0, 1], [0], region, {}),
            ([32], [0], region, {}),
            ([0], [16], region, {}),
            ([0], [8], region[0:32_768], {}),
            ([-1], [0], region, {}),
            ([0], [-1], region, {}),
            ([0], [0], region, {"page_bytes": 0}),
            ([0], [0], region, {"source_offset": 131_071}),
            ([0], [0], region, {"target_offset": 65_535}),
            ([0.5], [0], region, {}),
        ):
            try:
                read_pages(key, sources, where, targets, **{"page_bytes": 4096, **changed})
            except (ValueError, TypeError):
                continue
            raise AssertionError(f"pages {sources} -> {targets} with {changed} were taken")
        try:
            read_pages(carried_key(exposed, access="write"), [0], region, [0], page_bytes=4096)
        except ValueError:
            assert_bytes(view_of(region), content, "after refused reads")
            return
        raise AssertionError("pages were read with a key that carries no right to read")


async def check_cancelled_reads_write_nothing_more(factory: FabricFactory) -> None:
    """INV-2 of a destination: once an awaited read was cancelled, no byte arrives there any more."""
    async with open_pair(factory) as pair:
        _needs_reads(pair, factory)
        pages, page_bytes = list(range(64)), max(64, factory.deep_write_bytes // 16)
        region, _ = await pair.source(len(pages) * page_bytes)
        exposed, memory = await pair.poisoned(len(pages) * page_bytes)
        memory[:] = b"\x11" * len(memory)
        key = carried_key(exposed, access="read")
        await pair.peer()
        for patience in (0, 0, 1, 2, 3, 5, 8, 13):
            reads = [
                pair.writer.read(key, 0, region),
                *(pair.writer.read_pages(key, pages, region, pages[::-1], page_bytes=page_bytes) for _ in range(3)),
            ]
            await cancelled_after(patience, [partial(awaiting, read) for read in reads])
            view_of(region)[:] = bytes([POISON]) * len(memory)
            settling, _ = await pair.source(4096)
            for _ in range(5):
                await pair.writer.read(key, 0, settling)
            assert_bytes(view_of(region), bytes([POISON]) * len(memory), f"after {patience} turns and a cancellation")
            await settling.release()


async def check_reads_of_revoked_keys(factory: FabricFactory) -> None:
    """A revoked key reads nothing."""
    async with open_pair(factory) as pair:
        _needs_reads(pair, factory)
        region, content = await pair.source(100_000)
        exposed, _ = await pair.poisoned(100_000)
        key = carried_key(exposed, access="read")
        await exposed.revoke()
        reads: tuple[Callable[[], af.Transfer], ...] = (
            lambda: pair.writer.read(key, 0, region),
            lambda: pair.writer.read_pages(key, [0, 2], region, [1, 0], page_bytes=4096),
        )
        for read in reads:
            try:
                await read()
            except (af.StaleKeyError, af.TransferError):
                assert_bytes(view_of(region), content, "after a refused read")
            else:
                raise AssertionError("a revoked key was read with")


async def check_reads_refused_without_the_capability(factory: FabricFactory) -> None:
    """Rails without reads refuse in an error of that transfer."""
    async with open_pair(factory) as pair:
        if _can_read(pair):
            skip(f"{factory.name}: rails have reads")
        region, _ = await pair.source(4096)
        exposed, _ = await pair.poisoned(4096)
        try:
            await pair.writer.read(carried_key(exposed, access="read"), 0, region)
        except (af.TransferError, ValueError):
            return
        raise AssertionError("a read succeeded on rails that claim to have none")


async def _read_and_compare(
    pair: Pair,
    sources: Sequence[int],
    targets: Sequence[int],
    page_bytes: int,
    strides: tuple[int, int],
    offsets: tuple[int, int] = (0, 0),
    length: int = MIB,
) -> None:
    region, content = await pair.source(length)
    exposed, memory = await pair.poisoned(length)
    remote = pair.chance.randbytes(length)
    memory[:] = remote
    expected = bytearray(content)
    for source, target in zip(sources, targets, strict=True):
        start, end = offsets[0] + source * strides[0], offsets[1] + target * strides[1]
        expected[end : end + page_bytes] = remote[start : start + page_bytes]
    result = await pair.writer.read_pages(
        carried_key(exposed, access="read"),
        array("q", sources),
        region,
        array("q", targets),
        page_bytes=page_bytes,
        source_stride=strides[0],
        target_stride=strides[1],
        source_offset=offsets[0],
        target_offset=offsets[1],
    )
    assert result.bytes == len(sources) * page_bytes
    assert_bytes(view_of(region), bytes(expected), f"{len(sources)} pages of {page_bytes} that were read")
    assert_bytes(memory, remote, "what was read")
    await region.release()
    await exposed.release()


def _needs_reads(pair: Pair, factory: FabricFactory) -> None:
    if not _can_read(pair):
        skip(f"{factory.name}: rails have no reads")


def _can_read(pair: Pair) -> bool:
    return any(rail.can_read for rail in pair.writer.rails) and any(rail.can_read for rail in pair.target.rails)
