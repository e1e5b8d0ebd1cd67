"""Ring 6: queues that are too small for the load, at both ends, and many connections at once."""

from __future__ import annotations

from contextlib import AsyncExitStack

import anyio
import pytest
from extent import ALL, cases
from links import far, near
from load import open_load

import asyncfabric as af

# Eight hundred threads share the two emulated cores.
PATIENT = {"connect_deadline": 120.0, "peer_deadline_network": 120.0, "peer_deadline_host": 120.0}


def test_many_immediates_and_few_receives() -> None:
    """The target has four receives for counts: senders are asked to come again, and no count is lost."""

    async def check() -> None:
        with anyio.fail_after(100):
            async with open_load(near(1), far(1, options="?receives=4"), slots=1, piece=64) as load:
                peer = await load.writer.connect(load.target.address)
                for _ in range(2_000):
                    load.writer.signal(peer, load.counter.imm)
                assert await load.counter.wait(2_000) == 2_000
                await load.writer.signal(peer, load.counter.imm)
                assert await load.counter.wait(2_001) == 2_001

    anyio.run(check, backend="trio")


@pytest.mark.parametrize("depth", cases([16], [64]))
def test_full_send_queues(depth: int) -> None:
    """Many writes through a queue of sixteen: each is counted once, in spite of every refusal."""
    writes = 3_000 if ALL else 1_000

    async def check() -> None:
        with anyio.fail_after(100):
            async with open_load(near(2, options=f"?depth={depth}"), far(2), slots=writes, piece=65) as load:
                await load.settle([load.submit() for _ in range(writes)])
                assert not load.failed
                load.check_bytes()
                assert await load.counter.wait(writes) == writes

    anyio.run(check, backend="trio")


def test_many_fabrics_connect_at_once() -> None:
    """More than a table of 128 handshakes: each with a device, an address and a peer of its own."""
    count = 256 if ALL else 136

    async def check() -> None:
        with anyio.fail_after(250):
            async with (
                AsyncExitStack() as stack,
                af.open_fabric(af.FabricConfig(rails=near(1), **PATIENT)) as writer,
            ):
                slim = "?receives=16&depth=16"
                config = af.FabricConfig(rails=far(1, options=slim), max_ops=64, **PATIENT)
                members = [await stack.enter_async_context(af.open_fabric(config)) for _ in range(count)]
                counters = [member.counter(7) for member in members]
                peers: list[af.Peer] = []

                async def greet(member: af.Fabric) -> None:
                    peers.append(await writer.connect(member.address))

                async with anyio.create_task_group() as tasks:
                    for member in members:
                        tasks.start_soon(greet, member)
                await writer.barrier(af.PeerGroup(peers), 7)
                for counter in counters:
                    assert await counter.wait(1) == 1

    anyio.run(check, backend="trio")
