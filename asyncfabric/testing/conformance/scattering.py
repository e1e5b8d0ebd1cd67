"""Checks of scatter and barrier over groups of 1 to 64 peers, with odd lengths at each."""

from __future__ import annotations

import random

import asyncfabric as af
from asyncfabric import ScatterTarget
from asyncfabric.testing.conformance.setting import (
    POISON,
    FabricFactory,
    assert_bytes,
    assert_untouched,
    carried_address,
    carried_key,
    memory_of,
    open_many,
    open_pair,
    view_of,
)

GROUPS = (1, 2, 3, 7, 64)


async def check_scatter_to_many(factory: FabricFactory) -> None:
    """One call, a slice of odd length to each peer, one count at each; no remainder is dropped."""
    chance = random.Random(factory.name)
    groups = [size for size in GROUPS if size <= factory.peers]
    async with factory.open() as writer, open_many(factory, max(groups)) as members:
        content = chance.randbytes(400_009)
        region = await memory_of(factory, writer, len(content), "local")
        view_of(region)[:] = content
        exposed = [await memory_of(factory, member, 80_000, "read-write") for member in members]
        keys = [carried_key(each) for each in exposed]
        counters = [member.counter() for member in members]
        await writer.warm([carried_address(member) for member in members])
        rounds = 0
        for size in groups:
            for each in exposed:
                view_of(each)[:] = bytes([POISON]) * 80_000
            imm = 1000 + size
            counters = [member.counter(imm) for member in members[:size]]
            plan = [
                (chance.randrange(320_000), chance.randrange(9), chance.choice((0, 1, 333, 4097, 70_001)))
                for _ in counters
            ]
            targets = [
                ScatterTarget(key, source, offset, length)
                for key, (source, offset, length) in zip(keys[:size], plan, strict=True)
            ]
            result = await writer.scatter(region, targets, imm=imm)
            assert result.bytes == sum(length for _, _, length in plan)
            for counter, each, (source, offset, length) in zip(counters, exposed[:size], plan, strict=True):
                assert await counter.wait(1) == 1
                memory = view_of(each)
                assert_untouched(memory[:offset], "before")
                assert_bytes(memory[offset : offset + length], content[source : source + length], f"of {size} peers")
                assert_untouched(memory[offset + length :], "after")
            rounds += 1
        assert rounds == len(groups)


async def check_scatter_to_one_peer_many_times(factory: FabricFactory) -> None:
    """Several targets may be of one peer, even of one region; each counts there."""
    async with open_pair(factory) as pair:
        region, content = await pair.source(100_001)
        exposed, memory = await pair.poisoned(200_000)
        key = carried_key(exposed)
        counter = pair.target.counter()
        targets = [
            ScatterTarget(key, 7, 0, 50_001),
            ScatterTarget(key, 0, 60_000, 3),
            ScatterTarget(key, 1, 70_000, 100_000),
        ]
        await pair.writer.scatter(region, targets, imm=counter.imm)
        assert await counter.wait(3) == 3
        assert_bytes(memory[:50_001], content[7:50_008], "first")
        assert_bytes(memory[60_000:60_003], content[:3], "second")
        assert_bytes(memory[70_000:170_000], content[1:100_001], "third")
        assert_untouched(memory[50_001:60_000], "between")


async def check_one_bad_target_refuses_the_scatter(factory: FabricFactory) -> None:
    """Bounds of all targets are checked at the call; nothing is sent when one is wrong."""
    async with open_pair(factory) as pair:
        region, _ = await pair.source(1000)
        exposed, memory = await pair.poisoned(1000)
        key = carried_key(exposed)
        counter = pair.target.counter()
        for bad in ((0, 0, 1001), (0, 1, 1000), (1, 0, 1000), (-1, 0, 1), (0, -1, 1), (0, 0, -1)):
            try:
                pair.writer.scatter(region, [ScatterTarget(key, 0, 0, 1000), ScatterTarget(key, *bad)], imm=counter.imm)
            except ValueError:
                continue
            raise AssertionError(f"scatter target {bad} was taken")
        await pair.writer.signal(await pair.peer(), counter.imm)
        assert await counter.wait(1) == 1, "refused calls count nothing"
        assert_untouched(memory, "refused scatters")


async def check_barrier_of_a_group(factory: FabricFactory) -> None:
    """Each member sees one count per barrier, also after many rounds."""
    size = min(8, factory.peers)
    async with factory.open() as writer, open_many(factory, size) as members:
        group = af.PeerGroup([await writer.connect(carried_address(member)) for member in members])
        counters = [member.counter(3) for member in members]
        for number in range(1, 21):
            await writer.barrier(group, 3)
            for counter in counters:
                assert await counter.wait(number) == number
