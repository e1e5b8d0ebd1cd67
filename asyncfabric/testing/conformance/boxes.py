"""Checks of write_boxes, where the rail gathers, and of a clear refusal where it does not.

What was written is compared with a model made with plain slices, what was summed with the xxhash library.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import anyio
import numpy as np
import xxhash

import asyncfabric as af
from asyncfabric._api.boxes import write_boxes
from asyncfabric.testing.conformance.setting import (
    MIB,
    POISON,
    FabricFactory,
    Pair,
    assert_bytes,
    assert_untouched,
    carried_key,
    open_pair,
    skip,
    view_of,
)

Row = list[int]
"""source, target, run_bytes, two sizes, two strides."""


def _gathered(content: bytes, row: Row) -> bytes:
    source, _, run, rows, columns, down, right = row
    begins = (source + i * down + j * right for i, j in product(range(rows), range(columns)))
    return b"".join([content[begin : begin + run] for begin in begins])


async def _write_and_compare(pair: Pair, rows: list[Row], length: int) -> None:
    region, content = await pair.source(length)
    exposed, memory = await pair.poisoned(length)
    counter = pair.target.counter()
    expected, sums = bytearray([POISON]) * length, []
    for row in rows:
        part = _gathered(content, row)
        expected[row[1] : row[1] + len(part)] = part
        sums.append(xxhash.xxh3_64_intdigest(part))
    transfer, found = write_boxes(pair.writer, region, np.array(rows, np.int64), carried_key(exposed), counter.imm)
    result = await transfer
    assert result.bytes == transfer.total_bytes == sum(row[2] * row[3] * row[4] for row in rows)
    assert found.tolist() == sums, "what was summed is not what was to be written"
    assert await counter.wait(len(rows)) == len(rows)
    assert_bytes(memory, bytes(expected), f"{len(rows)} boxes")
    counter.close()
    await region.release()
    await exposed.release()


async def check_boxes(factory: FabricFactory) -> None:
    """Boxes of each shape arrive in order, are summed and counted, and nothing else is touched."""
    async with open_pair(factory) as pair:
        _needs_gathering(pair)
        shapes: list[Row] = [
            [0, 0, 256, 1, 1, 0, 0],  # the least
            [3, 5, 64, 4, 1, 64, 0],  # one run in pieces, nothing aligned
            [0, 1, 64, 5, 7, 4096, 128],
            [MIB, 64, 4096, 300, 1, 8192, 0],  # more than a request: columns of a matrix
            [7, 0, 5632, 2, 190, MIB, 5632],  # runs that requests and steps cut
            [0, 64, 3 * MIB + 64, 1, 1, 0, 0],  # one long run
            [128, 0, 128, 1, 2048, 0, 0],  # the same bytes again and again
        ]
        for row in shapes:
            await _write_and_compare(pair, [row], 4 * MIB)
        # Many in one call, more than a batch and than one immediate carries, of lengths that fit nothing.
        rows, at = [], 0
        for _ in range(1500):
            run, count = 64 * pair.chance.randrange(1, 9), pair.chance.randrange(4, 12)
            source = pair.chance.randrange(MIB)
            rows.append([source, at, run, count, 1, run + pair.chance.randrange(200), 0])
            at += run * count + pair.chance.randrange(3)
        await _write_and_compare(pair, rows, max(at, 2 * MIB))
        region, _ = await pair.source(4096)
        exposed, memory = await pair.poisoned(4096)
        nothing, sums = write_boxes(pair.writer, region, np.zeros((0, 7), np.int64), carried_key(exposed))
        assert (await nothing).bytes == 0 and sums.tolist() == []
        assert_untouched(memory, "no boxes")


async def check_boxes_refused_at_the_call(factory: FabricFactory) -> None:
    """What is no box, or leaves its memory, raises at the call, is named, and moves nothing."""
    async with open_pair(factory) as pair:
        _needs_gathering(pair)
        region, _ = await pair.source(8192)
        exposed, memory = await pair.poisoned(8192)
        key = carried_key(exposed)
        good = [0, 0, 256, 2, 2, 1024, 512]
        changes = [(0, -1), (0, 6401), (1, -64), (1, 7169), (2, 100), (2, 0), (2, -64), (3, 0), (3, 1 << 62), (4, -1)]
        for column, wrong in [*changes, (5, -64), (5, 1 << 62), (6, 8000)]:
            row = [*good]
            row[column] = wrong
            _expect(ValueError, pair, region, np.array([good, row], np.int64), key, "boxes[1]")
        _expect(ValueError, pair, region, np.array([[0, 0, 192]], np.int64), key, "256 or more")
        _expect(ValueError, pair, region, np.zeros((1, 4), np.int64), key, "columns")
        _expect(ValueError, pair, region, np.zeros((1, 21), np.int64), key, "columns")
        _expect(TypeError, pair, region, np.zeros((1, 7), np.float64), key, "int64")
        _expect(TypeError, pair, region, [good], key, "int64")
        _expect(TypeError, pair, region[0:4096], np.array([good], np.int64), key, "whole region")
        _expect(ValueError, pair, region, np.array([good], np.int64), carried_key(exposed, access="read"), "right")
        assert_untouched(memory, "refused boxes")
        transfer, _ = write_boxes(pair.writer, region, np.array([good], np.int64), key)
        assert (await transfer).bytes == 1024


async def check_boxes_under_a_dead_key(factory: FabricFactory) -> None:
    """Boxes under a revoked key write nothing, and those that were under way stop in order."""
    async with open_pair(factory) as pair:
        _needs_gathering(pair)
        region, content = await pair.source(8 * MIB)
        exposed, memory = await pair.poisoned(8 * MIB)
        key = carried_key(exposed)
        rows = np.array([[i * 65536, i * 65536, 65536] for i in range(128)], np.int64)
        transfers = [write_boxes(pair.writer, region, rows, key)[0] for _ in range(8)]
        await exposed.revoke()
        ended = bytes(memory)
        failed = 0
        for transfer in transfers:
            try:
                await transfer
            except (af.StaleKeyError, af.TransferError):
                failed += 1
        try:
            await write_boxes(pair.writer, region, rows, key)[0]
        except (af.StaleKeyError, af.TransferError):
            failed += 1
        assert failed, "boxes were written under a key that was revoked"
        assert_bytes(memory, ended, "after the key was revoked")
        for at in range(0, len(ended), 65536):
            part = ended[at : at + 65536]
            assert set(part) == {POISON} or content[at : at + 65536].startswith(part.rstrip(bytes([POISON])))


async def check_boxes_cancelled(factory: FabricFactory) -> None:
    """A cancelled transfer of boxes ends when nothing reads the source any more, and the next one is right."""
    async with open_pair(factory) as pair:
        _needs_gathering(pair)
        region, content = await pair.source(8 * MIB)
        exposed, _ = await pair.poisoned(8 * MIB)
        key = carried_key(exposed)
        rows = np.array([[i * 4096, i * 4096, 4096] for i in range(2048)], np.int64)
        await pair.peer()
        for wait_s in (0.0, 0.0, 0.0002, 0.001):
            with anyio.move_on_after(wait_s):
                await write_boxes(pair.writer, region, rows, key)[0]
            view_of(region)[:] = bytes(8 * MIB)
            view_of(region)[:] = content
            again, sums = write_boxes(pair.writer, region, rows[:16], key)
            await again
            assert sums.tolist() == [xxhash.xxh3_64_intdigest(content[at : at + 4096]) for at in range(0, 65536, 4096)]


async def check_boxes_refused_without_the_capability(factory: FabricFactory) -> None:
    """Rails that do not gather refuse by name, and move nothing."""
    async with open_pair(factory) as pair:
        if _gathers(pair):
            skip(f"{factory.name}: the rail gathers")
        region, _ = await pair.source(4096)
        exposed, memory = await pair.poisoned(4096)
        _expect(af.TransferError, pair, region, np.array([[0, 0, 4096]], np.int64), carried_key(exposed), "can_gather")
        assert_untouched(memory, "boxes on a rail that does not gather")


def _expect(kind: type[Exception], pair: Pair, region: Any, rows: Any, key: af.RegionKey, text: str) -> None:
    try:
        write_boxes(pair.writer, region, rows, key)
    except kind as error:
        assert text in str(error), f"{text!r} is not in: {error}"
        return
    raise AssertionError(f"boxes {rows!r} were accepted")


def _needs_gathering(pair: Pair) -> None:
    if not _gathers(pair):
        skip(f"{pair.factory.name}: the rails do not gather")


def _gathers(pair: Pair) -> bool:
    return sum(rail.can_gather for rail in pair.writer.rails) == 1
