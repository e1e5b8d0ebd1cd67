"""Checks of depth and width: more work than any queue holds, both directions at once, many peers together."""

from __future__ import annotations

import random
import resource

import anyio

import asyncfabric as af
from asyncfabric import Fabric, ImmCounter, Region, RegionKey
from asyncfabric.testing.conformance.setting import (
    MIB,
    FabricFactory,
    Pair,
    assert_bytes,
    carried_address,
    carried_key,
    memory_of,
    open_many,
    open_pair,
    until,
    view_of,
)

DEEP = 8192


async def check_deep_queue(factory: FabricFactory) -> None:
    """8,192 writes that nobody awaits, into a 16 MiB target, twice; memory does not grow between the rounds."""
    async with open_pair(factory) as pair:
        piece = factory.deep_write_bytes
        slots = 16 * MIB // piece if piece * DEEP > 16 * MIB else DEEP
        region, content = await pair.source(16 * MIB)
        exposed, memory = await pair.poisoned(16 * MIB)
        key = carried_key(exposed)
        counter = pair.target.counter()
        peaks = []
        for number in (1, 2, 3):
            for write in range(DEEP):
                slot = write % slots * piece
                pair.writer.write(region[slot : slot + piece], key, slot, imm=counter.imm)
            assert await counter.wait(number * DEEP) == number * DEEP
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # KiB
        covered = slots * piece
        assert_bytes(memory[:covered], content[:covered], "after the deep queue")
        assert peaks[2] - peaks[1] < 16 * 1024, f"peak memory in KiB after each round: {peaks}"


async def check_busy_and_writable(factory: FabricFactory) -> None:
    """A full queue raises BusyError and nothing else; `wait_writable` returns when there is room; ops count once."""
    async with open_pair(factory) as pair:
        region, _ = await pair.source(MIB)
        exposed, _ = await pair.poisoned(MIB)
        key = carried_key(exposed)
        counter = pair.target.counter()
        wanted, refused = 40_000, 0
        submitted = 0
        while submitted < wanted:
            try:
                pair.writer.write(region[0:4096], key, 0, imm=counter.imm)
            except af.BusyError:
                refused += 1
                await pair.writer.wait_writable()
            else:
                submitted += 1
        assert await counter.wait(wanted) == wanted, f"after {refused} refusals"


async def check_bidirectional_load(factory: FabricFactory) -> None:
    """Both sides write, count pages, signal and send at once; neither starves the other and all of it adds up."""
    async with open_pair(factory) as pair:
        forth = await _lane(pair, pair.writer, pair.target)
        back = await _lane(pair, pair.target, pair.writer)
        async with anyio.create_task_group() as tasks:
            for lane in (forth, back):
                tasks.start_soon(lane.push)
                tasks.start_soon(lane.receive)
        for lane in (forth, back):
            assert_bytes(lane.memory, lane.content, lane.name)


class _Lane:
    """One direction of the load."""

    rounds = 60
    region: Region
    content: bytes
    key: RegionKey
    memory: memoryview
    counter: ImmCounter

    def __init__(self, name: str, sender: Fabric, receiver: Fabric) -> None:
        self.name, self.sender, self.receiver = name, sender, receiver

    async def push(self) -> None:
        half, pages = MIB // 2, list(range(64))
        peer = await self.sender.connect(carried_address(self.receiver))
        for number in range(self.rounds):
            transfers = [
                self.sender.write(self.region[0:half], self.key, 0, imm=self.counter.imm),
                self.sender.write_pages(
                    self.region,
                    pages,
                    self.key,
                    pages,
                    page_bytes=8192,
                    source_stride=8192,
                    target_stride=8192,
                    source_offset=half,
                    target_offset=half,
                    imm=self.counter.imm,
                ),
                self.sender.signal(peer, self.counter.imm),
            ]
            await self.sender.send(peer, number.to_bytes(4, "little"))
            for transfer in transfers:
                await transfer

    async def receive(self) -> None:
        seen = []
        async for message in self.receiver.messages():
            seen.append(int.from_bytes(message.payload, "little"))
            if len(seen) == self.rounds:
                break
        assert sorted(seen) == list(range(self.rounds))
        assert await self.counter.wait(self.rounds * 66) == self.rounds * 66


async def _lane(pair: Pair, sender: Fabric, receiver: Fabric) -> _Lane:
    lane = _Lane("forth" if sender is pair.writer else "back", sender, receiver)
    lane.region = await memory_of(pair.factory, sender, MIB, "local")
    lane.content = pair.chance.randbytes(MIB)
    view_of(lane.region)[:] = lane.content
    exposed = await memory_of(pair.factory, receiver, MIB, "read-write")
    lane.key, lane.memory = carried_key(exposed), view_of(exposed)
    lane.counter = receiver.counter()
    return lane


async def check_many_peers_at_once(factory: FabricFactory) -> None:
    """All fabrics connect to one at the same moment by their first write; every one is served."""
    count = factory.peers
    chance = random.Random(factory.name)
    async with factory.open() as hub, open_many(factory, count) as members:
        exposed = await memory_of(factory, hub, 64 * count, "read-write")
        key_bytes = bytes(exposed.key())
        counter = hub.counter()
        content = chance.randbytes(64 * count)

        async def join(number: int, member: Fabric) -> None:
            region = await memory_of(factory, member, 64, "local")
            view_of(region)[:] = content[64 * number : 64 * number + 64]
            await member.connect(carried_address(hub))
            await member.write(region, RegionKey.from_bytes(key_bytes), 64 * number, imm=counter.imm)

        async with anyio.create_task_group() as tasks:
            for number, member in enumerate(members):
                tasks.start_soon(join, number, member)
        assert await counter.wait(count) == count
        assert_bytes(view_of(exposed), content, f"{count} peers")
        reports = await hub.warm([carried_address(member) for member in members])
        assert len(reports) == count


async def check_write_before_connected(factory: FabricFactory) -> None:
    """Writes to a peer that was never connected wait for the connection instead of failing (connect is implicit)."""
    async with open_pair(factory) as pair:
        region, content = await pair.source(100_000)
        exposed, memory = await pair.poisoned(100_000)
        await pair.writer.warm([carried_address(pair.target)])
        key = carried_key(exposed)
        counter = pair.target.counter()
        transfers = [pair.writer.write(region[i : i + 1000], key, i, imm=counter.imm) for i in range(0, 100_000, 1000)]
        assert await counter.wait(100) == 100
        assert_bytes(memory, content, "first writes")
        for transfer in transfers:
            await transfer


async def check_crossing_connects(factory: FabricFactory) -> None:
    """Both sides connect at the same moment, several times over: one peer each, and it works."""
    async with open_pair(factory) as pair:
        peers = []

        async def join(ours: Fabric, theirs: Fabric) -> None:
            peers.append((ours, await ours.connect(carried_address(theirs))))

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(join, pair.writer, pair.target)
                tasks.start_soon(join, pair.target, pair.writer)
        counters = {id(pair.writer): pair.writer.counter(8), id(pair.target): pair.target.counter(8)}
        for ours, peer in peers:
            await ours.signal(peer, 8)
        for counter in counters.values():
            assert await counter.wait(4) == 4
        await until(lambda: len(pair.writer.statistics().peers) == 1)
