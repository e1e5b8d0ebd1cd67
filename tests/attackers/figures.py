"""A measured process: opens a fabric, and times on order what its user does. Begun by `costs.py` and `nuisances.py`.

Takes orders in JSON lines, `{"do": NAME, ...}`, and answers each by one line; every figure is a list of microseconds.
Imports nothing but the package, so that it also runs with the Python of another tree.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import trio

import asyncfabric as af

PAGE, WINDOW, WINDOWS = 4096, 1 << 20, 8
BURST = 40  # messages; 64 of a peer may wait


class Measured:
    """A fabric, the peer that it works with, and what is timed between them; `beside` is a fabric of this process."""

    def __init__(self, fabric: af.Fabric, beside: af.Fabric, source: af.Region) -> None:
        self.fabric, self.beside, self.source = fabric, beside, source
        self.spare: list[af.Region] = []

    async def meet(self, address: str, key: str) -> dict[str, Any]:
        """Connect to a peer."""
        self.address = af.FabricAddress.from_bytes(bytes.fromhex(address))
        self.key = af.RegionKey.from_bytes(bytes.fromhex(key))
        self.peer = await self.fabric.connect(self.address)
        return {"met": True}

    async def keys(self, count: int) -> dict[str, Any]:
        """Make so many regions anew, and return keys of them; `took`: how long each took."""
        for region in self.spare:
            await region.release()
        self.spare = [await self.fabric.allocate(PAGE) for _ in range(count)]
        made, took = [], []
        for region in self.spare:
            began = time.perf_counter()
            made.append(region.key(access="write"))
            took.append((time.perf_counter() - began) * 1e6)
        return {"keys": [bytes(key).hex() for key in made], "took": took}

    async def page(self) -> dict[str, Any]:
        """Time awaited writes."""
        return {"took": await timed(100, lambda: self._write(self.source[:PAGE]))}

    async def window(self) -> dict[str, Any]:
        """Time windows, each MiB of them."""
        whole = self.source[:WINDOW]

        async def write() -> None:
            for transfer in [self.fabric.write(whole, self.key, 0) for _ in range(WINDOWS)]:
                await transfer

        return {"took": [took / WINDOWS for took in await timed(8, write)]}

    async def first(self, keys: list[str]) -> dict[str, Any]:
        """Time the first write with each of these keys."""
        fresh = iter([af.RegionKey.from_bytes(bytes.fromhex(key)) for key in keys])

        async def write() -> None:
            await self.fabric.write(self.source[:64], next(fresh), 0)

        return {"took": await timed(len(keys), write)}

    async def reconnect(self) -> dict[str, Any]:
        """Time connecting."""
        took = []
        for _ in range(4):
            await self.fabric.disconnect(self.peer)
            took += await timed(1, self._connect)
        return {"took": took}

    async def message(self) -> dict[str, Any]:
        """Time messages to the other fabric of this process, from the first that is sent to the last that is taken."""
        there = await self.fabric.connect(self.beside.address)
        arrivals = aiter(self.beside.messages())

        async def burst() -> None:
            for _ in range(BURST):
                await self.fabric.send(there, bytes(64))
            for _ in range(BURST):
                await anext(arrivals)

        return {"took": [took / BURST for took in await timed(12, burst)]}

    async def upkeep(self, rounds: int) -> dict[str, Any]:
        """Time what no peer but the other has to do with; `quarantined`: one for each release that failed so."""
        found: dict[str, list[float]] = {name: [] for name in ("register", "release", "statistics", "write")}
        found["quarantined"] = []
        for _ in range(rounds):
            memory = bytearray(PAGE)
            began = time.perf_counter()
            region = await self.fabric.register(memory)
            found["register"].append((time.perf_counter() - began) * 1e6)
            region.key(access="read-write")
            began = time.perf_counter()
            try:
                await region.release()
            except af.TransferError:
                found["quarantined"].append(1.0)
            found["release"].append((time.perf_counter() - began) * 1e6)
            began = time.perf_counter()
            self.fabric.statistics()
            found["statistics"].append((time.perf_counter() - began) * 1e6)
            found["write"] += await timed(1, lambda: self._write(self.source[:PAGE]))
        return found

    async def _write(self, source: af.RegionSlice) -> None:
        await self.fabric.write(source, self.key, 0)

    async def _connect(self) -> None:
        self.peer = await self.fabric.connect(self.address)


async def timed(count: int, call: Callable[[], Awaitable[Any]]) -> list[float]:
    """Return the microseconds of each of so many calls."""
    took = []
    for _ in range(count):
        began = time.perf_counter()
        await call()
        took.append((time.perf_counter() - began) * 1e6)
    return took


async def main(rail: str, secret: str) -> None:
    """Open, and do what is ordered until standard input ends."""
    config = af.FabricConfig(
        rails=(rail,), secret=bytes.fromhex(secret) or None, peer_deadline_host=600.0, drain_deadline=2.0
    )
    lines = trio.wrap_file(sys.stdin)
    async with af.open_fabric(config) as fabric, af.open_fabric(config) as beside:
        target, source = await fabric.allocate(WINDOW), await fabric.allocate(WINDOW)
        measured = Measured(fabric, beside, source)
        place = {"address": bytes(fabric.address).hex(), "key": bytes(target.key(access="write")).hex()}
        print(json.dumps(place), flush=True)
        async for line in lines:
            order = json.loads(line)
            answer = await getattr(measured, order.pop("do"))(**order)
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
