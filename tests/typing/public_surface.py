"""What a type checker must conclude about the public surface. Checked by `mypy --strict`, never run.

Each line is an assertion: a type that gets worse here gets worse for every user.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_type

import numpy as np

import asyncfabric as af


async def opening() -> None:
    async with af.open_fabric(af.FabricConfig(rails=("local", "tcp:lo"), polling="busy")) as fabric:
        assert_type(fabric, af.Fabric)
        assert_type(fabric.address, af.FabricAddress)
        assert_type(bytes(fabric.address), bytes)
        assert_type(af.FabricAddress.from_bytes(bytes(fabric.address)), af.FabricAddress)
        assert_type(fabric.statistics(), af.Statistics)
        rails: Sequence[af.RailInfo] = fabric.rails
        waiting: Sequence[af.Waiting] = fabric.why()
        assert_type(rails[0].provider, str)
        assert_type(waiting[0].missing_from, tuple[str, ...])


async def memory(fabric: af.Fabric) -> None:
    for owner in (bytearray(8), memoryview(bytearray(8)), np.zeros(8)):
        assert_type(await fabric.register(owner, access="read-write"), af.Region)
    region = await fabric.allocate(4096)
    assert_type(region, af.Region)
    assert_type(region[0:16], af.RegionSlice)
    key = region.key(access="write")
    assert_type(key, af.RegionKey)
    assert_type(af.RegionKey.from_bytes(bytes(key)), af.RegionKey)
    await region.revoke()
    await region.release()


async def moving(fabric: af.Fabric, region: af.Region, key: af.RegionKey, peer: af.Peer) -> None:
    pages = np.arange(4, dtype=np.int64)
    transfer = fabric.write(region[0:16], key, 0, imm=7)
    assert_type(transfer, af.Transfer)
    result = await transfer
    assert_type(result, af.TransferResult)
    assert_type(result.bytes, int)
    assert_type(result.duration, float)
    batch = fabric.write_pages(region, pages, key, pages, page_bytes=512, source_stride=512, target_stride=1024)
    assert_type(batch, af.Transfer)
    assert_type(fabric.scatter(region, [af.ScatterTarget(key, 0, 0, 16)], imm=1), af.Transfer)
    assert_type(fabric.signal(peer, 3), af.Transfer)
    assert_type(fabric.read(key, 0, region[0:16]), af.Transfer)
    assert_type(await fabric.connect(fabric.address), af.Peer)


async def counting(fabric: af.Fabric) -> None:
    counter = fabric.counter()
    assert_type(counter, af.ImmCounter)
    assert_type(counter.imm, int)
    assert_type(counter.value, int)
    async for value in counter:
        assert_type(value, int)
    async with fabric.watch() as word:
        async for old, new in word:
            assert_type((old, new), tuple[int, int])


def errors(error: af.PeerError) -> None:
    assert_type(error.remedy, str)
    assert_type(error.raw, int)
    broken: af.BrokenError = error
    fabric_error: af.FabricError = broken
    raise fabric_error
