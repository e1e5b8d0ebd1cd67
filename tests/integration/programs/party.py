"""One process of an integration test: reads commands as JSON lines, answers each with one JSON line.

Run as `python party.py`. Every command is a method below: `{"do": "expose", "length": 64}` calls `expose(length=64)`.
Exceptions are answered as {"error": class name, "text": ..., "seconds": ...}; the process ends with standard input.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import resource
import time
from typing import Any

import numpy as np
import trio
from json_lines import answer, lines

import asyncfabric as af
from asyncfabric._api.boxes import write_boxes

POISON = 0xA5
PR_SET_PDEATHSIG = 1


class Party:
    """What one process holds."""

    def __init__(self, fabric: Any) -> None:
        self.fabric = fabric
        self.regions: dict[str, Any] = {}
        self.counters: dict[int, Any] = {}
        self.keys: dict[str, Any] = {}

    async def about(self) -> dict[str, Any]:
        return {"address": bytes(self.fabric.address).hex(), "rails": [rail.provider for rail in self.fabric.rails]}

    async def expose(
        self, length: int, name: str = "target", memory: str = "allocated", seed: int = 0
    ) -> dict[str, Any]:
        """Make a region; poisoned, or with the bytes of a seed."""
        if memory == "allocated":
            region = await self.fabric.allocate(length, device="cpu")
        else:
            region = await self.fabric.register(bytearray(length), access="read-write")
        content = random.Random(seed).randbytes(length) if seed else bytes([POISON]) * length
        memoryview(region)[:] = content
        self.regions[name] = region
        return {"key": bytes(region.key()).hex()}

    async def digest(self, offset: int = 0, length: int | None = None, name: str = "target") -> dict[str, Any]:
        view = memoryview(self.regions[name])
        part = bytes(view[offset : None if length is None else offset + length])
        return {"sha": hashlib.sha256(part).hexdigest(), "poison": part.count(POISON), "length": len(part)}

    async def find(self, byte: int, name: str = "target") -> dict[str, Any]:
        return {"count": bytes(memoryview(self.regions[name])).count(byte)}

    async def revoke(self, name: str = "target") -> dict[str, Any]:
        await self.regions[name].revoke()
        return {"key": bytes(self.regions[name].key()).hex()}

    async def release(self, name: str = "target") -> dict[str, Any]:
        await self.regions[name].release()
        return {}

    async def counter(self, imm: int | None = None) -> dict[str, Any]:
        counter = self.fabric.counter(imm)
        self.counters[counter.imm] = counter
        return {"imm": counter.imm}

    async def close_counter(self, imm: int) -> dict[str, Any]:
        self.counters.pop(imm).close()
        return {"closed": imm}

    async def wait(self, imm: int, value: int, address: str = "") -> dict[str, Any]:
        """Wait for a count; with an address, declaring that it comes from there."""
        peers = [await self.connect_to(address)] if address else []
        return {"value": await self.counters[imm].wait(value, peers=peers)}

    async def value(self, imm: int) -> dict[str, Any]:
        return {"value": self.counters[imm].value}

    async def connect(self, address: str) -> dict[str, Any]:
        peer = await self.connect_to(address)
        return {"provider": peer.statistics().provider}

    async def connect_to(self, address: str) -> Any:
        return await self.fabric.connect(af.FabricAddress.from_bytes(bytes.fromhex(address)))

    async def write(
        self, key: str, length: int, offset: int = 0, imm: int | None = None, name: str = "source"
    ) -> dict[str, Any]:
        result = await self.fabric.write(self.regions[name][0:length], self.key(key), offset, imm=imm)
        return {"bytes": result.bytes, "rails": list(result.rails)}

    async def pieces(self, key: str, count: int, imm: int, name: str = "source") -> dict[str, Any]:
        """Write a region in equal pieces, all of them posted before the first is awaited."""
        region = self.regions[name]
        size = region.length // count
        key_of = self.key(key)
        transfers = [
            self.fabric.write(region[at : at + size], key_of, at, imm=imm) for at in range(0, count * size, size)
        ]
        return {"bytes": sum([(await transfer).bytes for transfer in transfers])}

    async def pages(self, key: str, count: int, page_bytes: int, imm: int, name: str = "source") -> dict[str, Any]:
        """Write the pages of the source in reversed order."""
        result = await self.fabric.write_pages(
            self.regions[name],
            list(range(count)),
            self.key(key),
            list(reversed(range(count))),
            page_bytes=page_bytes,
            source_stride=page_bytes,
            target_stride=page_bytes,
            imm=imm,
        )
        return {"bytes": result.bytes}

    async def columns(self, key: str, rows: int, row_bytes: int, imm: int, name: str = "source") -> dict[str, Any]:
        """Write the left halves of the rows of the source behind each other, then the right halves."""
        half = row_bytes // 2
        boxes = [[side * half, side * half * rows, half, rows, row_bytes] for side in range(2)]
        transfer, sums = write_boxes(self.fabric, self.regions[name], np.array(boxes, np.int64), self.key(key), imm)
        result = await transfer
        return {"bytes": result.bytes, "sums": sums.tolist()}

    async def send(self, address: str, text: str) -> dict[str, Any]:
        """Send a message."""
        await self.fabric.send(await self.connect_to(address), text.encode())
        return {}

    async def receive(self) -> dict[str, Any]:
        """Return the next message."""
        message = await anext(self.fabric.messages())
        return {"text": bytes(message.payload).decode()}

    async def signal(self, address: str, imm: int) -> dict[str, Any]:
        await self.fabric.signal(await self.connect_to(address), imm)
        return {}

    async def stream(
        self, key: str, piece: int, window: int = 8, imm: int | None = None, name: str = "source"
    ) -> dict[str, Any]:
        """Write for ever with a window of transfers; `{"streaming": true}` after the first, an error at the end."""
        target, region, done = self.key(key), self.regions[name], 0
        pending = [self.fabric.write(region[0:piece], target, 0, imm=imm) for _ in range(window)]
        while True:
            await pending.pop(0)
            done += 1
            if done == 1:
                answer({"streaming": True})
            pending.append(self.fabric.write(region[0:piece], target, done % 8 * piece, imm=imm))

    async def submit(self, key: str, piece: int, count: int, imm: int, name: str = "source") -> dict[str, Any]:
        """Submit writes that nobody awaits."""
        for number in range(count):
            self.fabric.write(self.regions[name][0:piece], self.key(key), number * piece, imm=imm)
        return {}

    async def idle(self, seconds: float) -> dict[str, Any]:
        """Do nothing for a while and state how much of a core that took."""
        before, started = _cpu_seconds(), time.monotonic()
        await trio.sleep(seconds)
        return {"share": (_cpu_seconds() - before) / (time.monotonic() - started)}

    async def census(self) -> dict[str, Any]:
        return {
            "fds": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "stale": self.fabric.statistics().stale_arrivals,
            "connected": sum(peer.state == "connected" for peer in self.fabric.statistics().peers),
        }

    def key(self, text: str) -> Any:
        if text not in self.keys:
            self.keys[text] = af.RegionKey.from_bytes(bytes.fromhex(text))
        return self.keys[text]


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def main() -> None:
    commands = lines()
    first = json.loads(await anext(commands))
    config = af.FabricConfig(rails=tuple(first["rails"]), **first.get("options", {}))
    async with af.open_fabric(config) as fabric:
        party = Party(fabric)
        answer(await party.about())
        async for line in commands:
            command = json.loads(line)
            name = command.pop("do")
            if name == "close":
                break
            started = time.monotonic()
            try:
                result = await getattr(party, name)(**command)
            except (af.FabricError, ValueError) as error:
                seconds = time.monotonic() - started
                result = {"error": type(error).__name__, "text": str(error), "seconds": seconds, "at": time.monotonic()}
            answer(result)
    answer({"closed": True})


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 9)  # no orphan survives the test that started it
    trio.run(main)
