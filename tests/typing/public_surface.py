"""What a type checker must conclude about the public surface. Checked by `mypy --strict`, never run.

Each line is an assertion: a type that gets worse here gets worse for every user.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_type

import numpy as np

import asyncfabric as af
from asyncfabric import blocking


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


def without_a_loop(address: af.FabricAddress, key: af.RegionKey) -> None:
    with blocking.open_fabric(af.FabricConfig()) as fabric:
        assert_type(fabric, blocking.Fabric)
        assert_type(fabric.address, af.FabricAddress)
        peer = fabric.connect(address)
        assert_type(peer, af.Peer)
        region = fabric.allocate(4096)
        assert_type(region, blocking.Region)
        assert_type(fabric.register(bytearray(8)), blocking.Region)
        assert_type(region[0:16], af.RegionSlice)
        transfer = fabric.write(region[0:16], key, 0, imm=7)
        assert_type(transfer, blocking.Transfer)
        assert_type(transfer.done, bool)
        assert_type(transfer.wait(deadline=1.0), af.TransferResult)
        assert_type(blocking.wait_all([transfer, fabric.signal(peer, 3)], 1), list[af.TransferResult])
        assert_type(fabric.read_pages(key, [0], region, [1], page_bytes=8), blocking.Transfer)
        with fabric.counter() as counter:
            assert_type(counter, blocking.ImmCounter)
            assert_type(counter.wait(3, [peer], deadline=0.5), int)
            for value in counter:
                assert_type(value, int)
        assert_type(fabric.messages().receive(0.5), af.Message)
        for message in fabric.messages():
            assert_type(message, af.Message)
        with fabric.watch() as word:
            assert_type(word.wait(1), tuple[int, int])
            for old, new in word:
                assert_type((old, new), tuple[int, int])
        assert_type(region.release(), None)


def errors(error: af.PeerError) -> None:
    assert_type(error.remedy, str)
    assert_type(error.raw, int)
    broken: af.BrokenError = error
    fabric_error: af.FabricError = broken
    raise fabric_error
