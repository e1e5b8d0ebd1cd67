"""A measured process among many that write to each other at once, with a torch process group for the same bytes.

Its target region has a slot for each rank. On GPUs rank n takes GPU n, round the machine's.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

import asyncfabric as af
from asyncfabric_services.bench.transfers.fabric_worker import FabricWorker

POISON = 0xA5
MIXER = 0x1E3779B97F4A7C15
"""Odd, so that different words stay different."""


class MeshWorker(FabricWorker):
    """One rank; opened by `do_open`, `do_join` and `do_meet`."""

    _rank: int
    _ranks: int
    _most: int
    _device: str
    _source: af.Region
    _target: af.Region
    _here: torch.Tensor
    _there: torch.Tensor
    _counter: af.ImmCounter
    _keys: list[af.RegionKey]
    _imms: list[int]
    _expected: int

    async def aclose(self) -> None:
        """Leave the process group and the fabric."""
        if dist.is_initialized():
            dist.destroy_process_group()
        await super().aclose()

    async def do_gpus(self) -> int:
        """Return how many GPUs this process sees."""
        return torch.cuda.device_count()

    async def do_open(self, config: dict[str, Any], rank: int = 0) -> dict[str, Any]:
        """Open the fabric; return its address and what its rail is."""
        on_gpu = config["rails"][0].startswith("cuda")
        self._device = f"cuda:{rank % torch.cuda.device_count()}" if on_gpu else "cpu"
        return await super().do_open(config | {"rails": [self._device]} if on_gpu else config)

    async def do_join(self, rank: int, ranks: int, meeting: str, most: int) -> dict[str, Any]:
        """Join the process group and make memory for writes of `most` bytes; return what the others must know."""
        torch.set_num_threads(1)
        self._rank, self._ranks, self._most = rank, ranks, most
        if self._device != "cpu":
            torch.cuda.set_device(self._device)
        gpu = None if self._device == "cpu" else torch.device(self._device)
        dist.init_process_group(
            "nccl" if gpu else "gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks, device_id=gpu
        )
        self._source = await self._fabric.allocate(most, device=self._device)
        self._target = await self._fabric.allocate(ranks * most, device=self._device)
        self._here, self._there = _tensor(self._source), _tensor(self._target)
        self._here.copy_(self._content(rank))
        self._counter = self._fabric.counter()
        self._expected = 0
        return {"key": bytes(self._target.key(access="write")).hex(), "imm": self._counter.imm}

    async def do_meet(self, addresses: list[str], cards: list[dict[str, Any]]) -> None:
        """Connect to the others."""
        self._keys = [af.RegionKey.from_bytes(bytes.fromhex(each["key"])) for each in cards]
        self._imms = [each["imm"] for each in cards]
        for address in addresses:
            await self._fabric.connect(af.FabricAddress.from_bytes(bytes.fromhex(address)))

    async def do_write(self, pattern: str, op_bytes: int, count: int) -> float:
        """Write `count` times to each target of this rank, all in flight, and wait for what comes; return seconds."""
        targets = self._targets(pattern)
        at = self._rank * self._most
        self._expected += count * len(targets)
        self._settle()
        started = time.perf_counter()
        transfers = []
        for _ in range(count):
            for each in targets:
                while True:
                    try:
                        transfers.append(
                            self._fabric.write(self._source[:op_bytes], self._keys[each], at, self._imms[each])
                        )
                        break
                    except af.BusyError:
                        await self._fabric.wait_writable()
        for transfer in transfers:
            await transfer
        await self._counter.wait(self._expected)
        return time.perf_counter() - started

    async def do_rival(self, pattern: str, op_bytes: int, count: int) -> float:
        """Do the same with send and recv of torch's process group; return seconds."""
        source = self._here[:op_bytes]
        slots = {each: self._there[each * self._most : each * self._most + op_bytes] for each in self._sources(pattern)}
        self._settle()
        started = time.perf_counter()
        for _ in range(count):
            works = dist.batch_isend_irecv(
                [
                    *(dist.P2POp(dist.isend, source, each) for each in self._targets(pattern)),
                    *(dist.P2POp(dist.irecv, slot, each) for each, slot in slots.items()),
                ]
            )
            for work in works:
                work.wait()
        if self._device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    async def do_check(self, pattern: str, op_bytes: int) -> str:
        """Write once into poisoned slots and look at all that came, and at what must not have; "" is good."""
        self._there.fill_(POISON)
        await self.do_write(pattern, op_bytes, 1)
        self._settle()
        for each in range(self._ranks):
            slot = self._there[each * self._most : (each + 1) * self._most]
            wanted = torch.full_like(slot, POISON)
            if each in self._sources(pattern):
                wanted[:op_bytes] = self._content(each)[:op_bytes]
            if not torch.equal(slot, wanted):
                return f"rank {self._rank}: {int((slot != wanted).sum())} bytes of rank {each} are wrong"
        return ""

    def _targets(self, pattern: str) -> list[int]:
        return self._around(pattern, 1)

    def _sources(self, pattern: str) -> list[int]:
        return self._around(pattern, -1)

    def _around(self, pattern: str, step: int) -> list[int]:
        """Return the ranks in the order of the circle, so that not all begin with the same one."""
        hops = range(1, self._ranks) if pattern == "all-to-all" else (1,)
        return [(self._rank + step * hop) % self._ranks for hop in hops]

    def _content(self, rank: int) -> torch.Tensor:
        """Return what a rank sends; no two words of it, and no two ranks, are alike."""
        words = torch.arange(-(-self._most // 8), dtype=torch.int64, device=self._device)
        return ((words * 64 + rank + 1) * MIXER).view(torch.uint8)[: self._most]

    def _settle(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()
        dist.barrier()
        if self._device != "cpu":
            torch.cuda.synchronize()


def _tensor(region: af.Region) -> torch.Tensor:
    if region.device == "cpu":
        return torch.frombuffer(region.memory, dtype=torch.uint8)
    return region.tensor(torch.uint8)
