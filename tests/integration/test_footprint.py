"""What a fabric costs when it does nothing, and what it leaves behind when it is closed."""

from __future__ import annotations

import os
import threading

import anyio
import pytest
from availability import need
from processes import party

import asyncfabric as af

MIB = 1 << 20


@pytest.mark.parametrize("rail", ["local", "tcp"])
def test_idle_fabric_sleeps(rail: str) -> None:
    """An adaptive fabric with a connected peer takes less than 1 % of a core when nothing happens."""
    need(rail)
    with party(rail) as one, party(rail) as two:
        home = one.receive()["address"]
        two.receive()
        imm = one.ask("counter")["imm"]
        two.ask("signal", address=home, imm=imm)
        one.ask("wait", imm=imm, value=1)
        one.send(do="idle", seconds=2.5)
        two.send(do="idle", seconds=2.5)
        shares = [one.receive()["share"], two.receive()["share"]]
        assert max(shares) < 0.01, shares
        two.ask("signal", address=home, imm=imm)
        assert one.ask("wait", imm=imm, value=2)["value"] == 2, "and it still wakes up"
        one.close()
        two.close()


@pytest.mark.parametrize("rails", [("local",), ("local", "local"), ("tcp",), ("fault+local?reorder=8",)])
def test_open_and_close_leak_nothing(rails: tuple[str, ...]) -> None:
    """Threads and descriptors after the fourth round are those after the first.

    But for Python's: trio ends a worker thread of an earlier test when it had nothing to do for ten seconds.
    """
    need(*rails)

    async def life() -> None:
        config = af.FabricConfig(rails=rails)
        async with af.open_fabric(config) as writer, af.open_fabric(config) as target:
            exposed = await target.allocate(MIB, device="cpu")
            region = await writer.register(bytearray(MIB), access="local")
            counter = target.counter()
            for _ in range(10):
                writer.write(region, exposed.key(), 0, imm=counter.imm)
            await counter.wait(10)

    counts = []
    for _ in range(4):
        anyio.run(life, backend="trio")
        python = threading.active_count()
        counts.append((len(os.listdir("/proc/self/task")) - python, len(os.listdir("/proc/self/fd")), python))
    first, last = counts[0], counts[3]
    assert last[:2] == first[:2] and last[2] <= first[2], counts


def test_regions_are_returned() -> None:
    """Registering, allocating and releasing thousands of regions does not add up."""
    need("local")

    async def main() -> None:
        async with af.open_fabric(af.FabricConfig(rails=("local",))) as fabric:
            buffer = bytearray(4096)
            for _ in range(50):
                await (await fabric.register(buffer)).release()
                await (await fabric.allocate(4096)).release()
            before = len(os.listdir("/proc/self/fd")), fabric.statistics().registered_bytes
            for _ in range(1000):
                await (await fabric.register(buffer)).release()
                await (await fabric.allocate(4096)).release()
            assert (len(os.listdir("/proc/self/fd")), fabric.statistics().registered_bytes) == before

    anyio.run(main, backend="trio")
