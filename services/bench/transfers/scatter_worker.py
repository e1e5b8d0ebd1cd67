"""A measured process with many fabrics: the receivers of scatters. The sender is an ordinary fabric with many peers."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import numpy as np

import asyncfabric as af
from asyncfabric.bench.pattern import POISON, Bytes, first_difference, random_bytes
from asyncfabric.bench.scatter import scatter_rounds
from asyncfabric_services.bench.worker import BenchWorker, config_of


class ScatterWorker(BenchWorker):
    """Either the sender (one fabric, keys of all targets) or a host of many receiving fabrics."""

    def __init__(self, meeting: int = -1) -> None:
        """Open nothing yet."""
        super().__init__(meeting)
        self._stack = AsyncExitStack()
        self._fabrics: list[af.Fabric] = []
        self._counters: list[af.ImmCounter] = []
        self._targets: list[af.ScatterTarget] = []
        self._region: af.Region | None = None
        self._memories: list[Bytes] = []

    async def aclose(self) -> None:
        """Close all fabrics."""
        self._memories.clear()
        await super().aclose()
        await self._stack.aclose()

    async def _open(self, config: dict[str, Any]) -> af.Fabric:
        fabric = await self._stack.enter_async_context(af.open_fabric(config_of(config)))
        self._fabrics.append(fabric)
        return fabric

    async def do_receive_open(
        self, config: dict[str, Any], fabrics: int, room_bytes: int, imm: int
    ) -> list[dict[str, str]]:
        """Open receiving fabrics, each with a poisoned region and a counter for `imm`; return addresses and keys."""
        ends = []
        for _ in range(fabrics):
            fabric = await self._open(config)
            self._counters.append(fabric.counter(imm))
            region = await fabric.allocate(room_bytes)
            memory = np.frombuffer(region.memory, dtype=np.uint8)
            memory[:] = POISON
            self._memories.append(memory)
            ends.append({
                "address": bytes(fabric.address).hex(),
                "key": bytes(region.key(access="write")).hex(),
            })  # fmt: skip
        return ends

    async def do_receive_wait(self, counts: list[int]) -> None:
        """Wait until the first counters reached `counts`, one for each."""
        for counter, count in zip(self._counters[: len(counts)], counts, strict=True):
            await counter.wait(count)

    async def do_receive_check(self, first: int, fabrics: int, lengths: list[int], stride: int, seed: int) -> str:
        """Check what landed; `first` is the index of this host's first target in the whole scatter. "" is good."""
        sent = random_bytes(stride * (first + len(self._memories)), seed)
        for index, memory in enumerate(self._memories):
            length = lengths[first + index] if index < fabrics else 0
            source = sent[(first + index) * stride :][:length]
            wrong = first_difference(memory[:length], source)
            if wrong is not None:
                return f"target {first + index}: byte {wrong} is wrong"
            if (memory[length:] != POISON).any():
                return f"target {first + index}: bytes after {length} were changed"
        return ""

    async def do_send_open(
        self, config: dict[str, Any], ends: list[dict[str, str]], lengths: list[int], stride: int, seed: int
    ) -> None:
        """Open the sending fabric, fill its region and connect to all ends."""
        fabric = await self._open(config)
        self._region = await fabric.allocate(stride * len(ends))
        self.memory = np.frombuffer(self._region.memory, dtype=np.uint8)
        await self.do_fill(seed)
        for index, end in enumerate(ends):
            await fabric.connect(af.FabricAddress.from_bytes(bytes.fromhex(end["address"])))
            key = af.RegionKey.from_bytes(bytes.fromhex(end["key"]))
            self._targets.append(af.ScatterTarget(key, index * stride, 0, lengths[index]))

    async def do_scatter(self, targets: int, count: int, imm: int) -> list[int]:
        """Scatter to the first `targets` ends; return nanoseconds for each."""
        assert self._region is not None
        return await scatter_rounds(self._fabrics[0], self._region, self._targets[:targets], count=count, imm=imm)
