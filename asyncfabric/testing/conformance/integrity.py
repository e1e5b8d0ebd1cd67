"""Checks of data: every byte of a write lands once, in its place, and no other byte changes.

Sizes sit around pages, shards and stripes: 16,385 bytes on two rails is where rounding loses one byte.
"""

from __future__ import annotations

import mmap
import os

from asyncfabric.testing.conformance.setting import (
    MIB,
    POISON,
    FabricFactory,
    assert_bytes,
    assert_untouched,
    carried_key,
    open_pair,
    skip,
    view_of,
)

SIZES = (
    0,
    1,
    4095,
    4096,
    4097,
    8191,
    8192,
    8193,
    16385,
    65535,
    65536,
    65537,
    131071,
    131073,
    196611,
    MIB - 1,
    MIB,
    MIB + 1,
)
GUARD = 4096
GIB = 1 << 30


async def check_integrity_at_sizes(factory: FabricFactory) -> None:
    """A write of each size is complete when awaited and counted, and touches nothing around its target."""
    async with open_pair(factory) as pair:
        region, content = await pair.source(max(SIZES))
        exposed, memory = await pair.poisoned(max(SIZES) + 2 * GUARD)
        key = carried_key(exposed)
        counter = pair.target.counter()
        for number, size in enumerate(SIZES, 1):
            memory[:] = bytes([POISON]) * len(memory)
            result = await pair.writer.write(region[0:size], key, GUARD, imm=counter.imm)
            assert result.bytes == size
            assert await counter.wait(number) == number, f"one write of {size} bytes counts one"
            assert_untouched(memory[:GUARD], f"bytes before a write of {size}")
            assert_bytes(memory[GUARD : GUARD + size], content[:size], f"a write of {size}")
            assert_untouched(memory[GUARD + size :], f"bytes after a write of {size}")


async def check_odd_offsets(factory: FabricFactory) -> None:
    """Offsets and lengths need no alignment at either end, and slices of slices name the right bytes."""
    async with open_pair(factory) as pair:
        region, content = await pair.source(300_007)
        exposed, memory = await pair.poisoned(300_007)
        key = carried_key(exposed)
        counter = pair.target.counter()
        for number in range(1, 41):
            memory[:] = bytes([POISON]) * len(memory)
            length = pair.chance.choice((1, 3, 17, 4097, 65_537, 200_003))
            start = pair.chance.randrange(300_007 - length + 1)
            offset = pair.chance.randrange(300_007 - length + 1)
            piece = region[start:300_007][0:length]
            await pair.writer.write(piece, key, offset, imm=counter.imm)
            await counter.wait(number)  # awaiting the write alone means that the source may be used again
            assert_untouched(memory[:offset], "before")
            assert_bytes(memory[offset : offset + length], content[start : start + length], f"{start}->{offset}")
            assert_untouched(memory[offset + length :], "after")


async def check_parallel_writes(factory: FabricFactory) -> None:
    """Many transfers in flight at once, of many sizes, each lands in its own place."""
    async with open_pair(factory) as pair:
        region, content = await pair.source(2 * MIB)
        exposed, memory = await pair.poisoned(2 * MIB)
        key = carried_key(exposed)
        counter = pair.target.counter()
        cuts = sorted(pair.chance.sample(range(1, 2 * MIB), 199))
        spans = list(zip([0, *cuts], [*cuts, 2 * MIB], strict=True))
        pair.chance.shuffle(spans)
        transfers = [pair.writer.write(region[a:b], key, a, imm=counter.imm) for a, b in spans]
        assert await counter.wait(len(spans)) == len(spans)
        assert_bytes(memory, content, "counted")
        assert sum([(await transfer).bytes for transfer in transfers]) == 2 * MIB


async def check_visible_when_counted(factory: FabricFactory) -> None:
    """INV-1: at the moment a count is seen its bytes are there, small and large, again and again."""
    async with open_pair(factory) as pair:
        sizes = [pair.chance.choice((8, 4096, 70_001, 262_145)) for _ in range(100)]
        region, _ = await pair.source(max(sizes))
        exposed, memory = await pair.poisoned(max(sizes))
        key = carried_key(exposed)
        counter = pair.target.counter()
        for number, size in enumerate(sizes, 1):
            content = pair.chance.randbytes(size)
            view_of(region)[:size] = content
            transfer = pair.writer.write(region[0:size], key, 0, imm=counter.imm)
            await counter.wait(number)
            assert_bytes(memory[:size], content, f"write {number} of {size} bytes was counted")
            await transfer


async def check_write_to_itself(factory: FabricFactory) -> None:
    """A fabric is its own peer like any other."""
    async with open_pair(factory) as pair:
        region, content = await pair.source(100_003, access="read-write")
        exposed, memory = await pair.poisoned(100_003)
        key = carried_key(exposed)
        back = await pair.poisoned(100_003)
        counter = pair.target.counter()
        await pair.writer.write(region, key, 0, imm=counter.imm)
        await counter.wait(1)
        await pair.target.write(exposed, carried_key(back[0]), 0, imm=counter.imm)
        await counter.wait(2)
        assert_bytes(back[1], content, "after the second hop, inside one fabric")
        assert_bytes(memory, content, "source of the second hop")


async def check_five_gib(factory: FabricFactory) -> None:
    """One write longer than 32 bits can express."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not factory.big:
        skip(f"{factory.name}: 5 GiB not asked for (big=False)")
    if free < 8 * GIB:
        skip(f"5 GiB needs 8 GiB of free memory, {free / GIB:.1f} GiB are free")
    length = 5 * GIB + 4097
    nothing = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # zeros that take no memory
    nothing.madvise(mmap.MADV_HUGEPAGE)
    async with open_pair(factory) as pair:
        source = await pair.writer.register(nothing)
        exposed = await pair.target.allocate(length, device="cpu")
        block = pair.chance.randbytes(MIB - 3)  # of odd size: a shifted copy is seen
        marks = [0, 1 * GIB - 11, 4 * GIB - 7, 4 * GIB + MIB + 5, length - len(block)]
        for mark in marks:
            view_of(source)[mark : mark + len(block)] = block
        counter = pair.target.counter()
        result = await pair.writer.write(source, carried_key(exposed), 0, imm=counter.imm)
        assert result.bytes == length
        assert await counter.wait(1) == 1
        for mark in marks:
            assert_bytes(view_of(exposed)[mark : mark + len(block)], block, f"block at {mark}")
        assert not any(view_of(exposed)[2 * GIB : 2 * GIB + MIB]), "bytes between the blocks are zero as in the source"
