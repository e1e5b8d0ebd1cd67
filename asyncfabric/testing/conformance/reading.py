"""Checks of one-sided reads, where the rails have them, and of a clear refusal where they have not."""

from __future__ import annotations

import asyncfabric as af
from asyncfabric.testing.conformance.setting import (
    MIB,
    FabricFactory,
    Pair,
    assert_bytes,
    carried_key,
    open_pair,
    skip,
    view_of,
)


async def check_reads(factory: FabricFactory) -> None:
    """A read of each size brings the bytes and touches nothing else at either end."""
    async with open_pair(factory) as pair:
        if not _can_read(pair):
            skip(f"{factory.name}: rails have no reads")
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


async def check_reads_of_revoked_keys(factory: FabricFactory) -> None:
    """A revoked key reads nothing."""
    async with open_pair(factory) as pair:
        if not _can_read(pair):
            skip(f"{factory.name}: rails have no reads")
        region, content = await pair.source(100_000)
        exposed, _ = await pair.poisoned(100_000)
        key = carried_key(exposed, access="read")
        await exposed.revoke()
        try:
            await pair.writer.read(key, 0, region)
        except (af.StaleKeyError, af.TransferError):
            assert_bytes(view_of(region), content, "after a refused read")
            return
        raise AssertionError("a revoked key was read with")


async def check_reads_refused_without_the_capability(factory: FabricFactory) -> None:
    """Rails without reads say so in an error of that transfer."""
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


def _can_read(pair: Pair) -> bool:
    return any(rail.can_read for rail in pair.writer.rails) and any(rail.can_read for rail in pair.target.rails)
