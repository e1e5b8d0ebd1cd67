"""A writer and a target over named rails, and writes that can be distinguished: each has a slot and bytes of its own.

What a test of failures must know afterwards: which writes succeeded, which failed and how, what was counted.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import asyncfabric as af

POISON = 0xA5


@dataclass
class Load:
    """Slots of `piece` bytes at both ends, and the fate of the write into each."""

    writer: af.Fabric
    target: af.Fabric
    piece: int
    source: af.Region
    content: bytes
    memory: bytearray
    key: af.RegionKey
    counter: af.ImmCounter
    slots: int
    good: list[int] = field(default_factory=list)
    failed: dict[int, af.FabricError] = field(default_factory=dict)
    rails: dict[int, tuple[int, ...]] = field(default_factory=dict)
    used: int = 0

    def submit(self) -> tuple[int, Any]:
        """Submit the write of the next slot, counted once."""
        slot, self.used = self.used, self.used + 1
        assert slot < self.slots, "the test writes more than it has slots for"
        begin = slot * self.piece
        part = self.source[begin : begin + self.piece]
        return slot, self.writer.write(part, self.key, begin, imm=self.counter.imm)

    async def settle(self, pending: list[tuple[int, Any]]) -> None:
        """Await writes and remember how each ended."""
        for slot, transfer in pending:
            try:
                self.rails[slot] = (await transfer).rails
                self.good.append(slot)
            except (af.TransferError, af.DeviceError, af.PeerError) as error:
                self.failed[slot] = error

    async def run(self, count: int, window: int = 8) -> None:
        """Write into the next `count` slots with a window in flight."""
        pending: list[tuple[int, Any]] = []
        for _ in range(count):
            pending.append(self.submit())
            if len(pending) == window:
                await self.settle([pending.pop(0)])
        await self.settle(pending)

    def check_bytes(self) -> None:
        """Every good slot holds its bytes; slots that nobody wrote are untouched."""
        for slot in range(self.slots):
            begin = slot * self.piece
            got = self.memory[begin : begin + self.piece]
            if slot in self.rails:
                assert got == self.content[begin : begin + self.piece], f"slot {slot} was reported written"
            elif slot >= self.used:
                assert got == bytes([POISON]) * self.piece, f"slot {slot} was never written"

    async def check_counts(self) -> None:
        """Nothing lost: each good write is counted. Nothing twice: a failed one may be, once."""
        value = await self.counter.wait(len(self.good))
        assert value <= self.used
        assert len(self.good) <= self.counter.value <= len(self.good) + len(self.failed)


@asynccontextmanager
async def open_load(
    near: tuple[str, ...], far: tuple[str, ...], *, slots: int, piece: int, **options: Any
) -> AsyncIterator[Load]:
    """Open both ends. A heartbeat has the time that an emulated machine may need, so that only the network fails."""
    patience = {"connect_deadline": 20.0, "peer_deadline_host": 5.0}
    config: dict[str, Any] = patience | {"stripe_bytes": 8192} | options
    async with (
        af.open_fabric(af.FabricConfig(rails=near, **config)) as writer,
        af.open_fabric(af.FabricConfig(rails=far, **config)) as target,
    ):
        content = random.Random(slots * piece).randbytes(slots * piece)
        source = await writer.register(bytearray(content), access="local")
        memory = bytearray([POISON]) * (slots * piece)
        exposed = await target.register(memory, access="write")
        key = af.RegionKey.from_bytes(bytes(exposed.key()))
        await writer.connect(af.FabricAddress.from_bytes(bytes(target.address)))
        yield Load(writer, target, piece, source, content, memory, key, target.counter(), slots)
