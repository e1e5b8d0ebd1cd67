"""A measured process with a fabric: what users have. Runs the workloads of asyncfabric.bench on its trio loop.

One region, one peer, one counter; the target waits for counts, so that a check never looks before the bytes are there.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any, Literal

import numpy as np

import asyncfabric as af
from asyncfabric import blocking
from asyncfabric.bench import messages, notify, pages, write
from asyncfabric_services.bench.worker import BenchWorker, config_of, lists_of

MemoryKind = Literal["allocated", "foreign", "host"]


class FabricWorker(BenchWorker):
    """One fabric, opened by `do_open`."""

    _fabric: af.Fabric
    _region: af.Region
    _key: af.RegionKey
    _peer: af.Peer
    _counter: af.ImmCounter
    _blocking: blocking.Fabric
    _blocking_source: blocking.Region

    def __init__(self, meeting: int = -1) -> None:
        """Open nothing yet."""
        super().__init__(meeting)
        self._stack = AsyncExitStack()

    async def aclose(self) -> None:
        """Close the fabric: drains what is in flight."""
        await super().aclose()
        await self._stack.aclose()

    async def do_open(self, config: dict[str, Any]) -> dict[str, Any]:
        """Open the fabric; return its address and what its rails are."""
        self._fabric = await self._stack.enter_async_context(af.open_fabric(config_of(config)))
        self._counter = self._fabric.counter()
        rail = self._fabric.rails[0]
        return {
            "address": bytes(self._fabric.address).hex(),
            "imm": self._counter.imm,
            "library": rail.library,
            "version": rail.version,
        }

    async def do_memory(self, kind: MemoryKind, length_bytes: int, seed: int | None) -> str:
        """Make a region: random bytes where they come from, poison where they go. Returns the key for peers."""
        if kind == "allocated":
            self._region = await self._fabric.allocate(length_bytes)
            self.memory = np.frombuffer(self._region.memory, dtype=np.uint8)
        else:
            self.memory = np.empty(length_bytes, dtype=np.uint8)
            self._region = await self._fabric.register(self.memory)
        if seed is None:
            await self.do_poison()
        else:
            await self.do_fill(seed)
        return bytes(self._region.key()).hex()

    async def do_connect(self, address: str, key: str) -> None:
        """Connect to the other end and keep its key."""
        self._peer = await self._fabric.connect(af.FabricAddress.from_bytes(bytes.fromhex(address)))
        self._key = af.RegionKey.from_bytes(bytes.fromhex(key))

    async def do_value(self) -> int:
        """Return the own counter's value."""
        return self._counter.value

    async def do_wait(self, target: int) -> None:
        """Wait until the own counter reached `target`."""
        await self._counter.wait(target)

    async def do_statistics(self) -> dict[str, int]:
        """Return the engine's counters."""
        return dict(self._fabric.statistics().counters)

    async def do_write_window(self, op_bytes: int, window: int, count: int, imm: int | None) -> dict[str, Any]:
        """Run one repeat of `write_window`."""
        run = await write.write_window(
            self._fabric, self._region, self._key, op_bytes=op_bytes, window=window, count=count, imm=imm
        )
        return {"seconds": run.seconds, "samples_ns": run.samples_ns}

    async def do_write_single(self, op_bytes: int, count: int, imm: int | None) -> dict[str, Any]:
        """Run one repeat of `write_single`."""
        run = await write.write_single(self._fabric, self._region, self._key, op_bytes=op_bytes, count=count, imm=imm)
        return {"seconds": run.seconds, "samples_ns": run.samples_ns}

    async def do_open_blocking(self, config: dict[str, Any], address: str, length_bytes: int) -> None:
        """Open a blocking fabric beside the other one, connected to the same end, with a region of its own."""
        self._blocking = self._stack.enter_context(blocking.open_fabric(config_of(config)))
        self._blocking.connect(af.FabricAddress.from_bytes(bytes.fromhex(address)))
        self._blocking_source = self._blocking.allocate(length_bytes)
        self._stack.callback(self._blocking_source.release)

    async def do_write_blocking(self, op_bytes: int, count: int, imm: int | None) -> dict[str, Any]:
        """Run one repeat of `write_blocking`, in the thread of the loop, which waits that long."""
        ends = (self._blocking, self._blocking_source, self._key)
        run = write.write_blocking(*ends, op_bytes=op_bytes, count=count, imm=imm)
        return {"seconds": run.seconds, "samples_ns": run.samples_ns}

    async def do_write_together(self, op_bytes: int, count: int, imm: int | None) -> dict[str, Any]:
        """Run one repeat of `write_together`."""
        run = await write.write_together(self._fabric, self._region, self._key, op_bytes=op_bytes, count=count, imm=imm)
        return {"seconds": run.seconds, "samples_ns": run.samples_ns}

    async def do_write_unawaited(self, op_bytes: int, count: int, imm: int | None) -> dict[str, Any]:
        """Run one round of `write_unawaited`."""
        run = await write.write_unawaited(
            self._fabric, self._region, self._key, op_bytes=op_bytes, count=count, imm=imm
        )
        return {
            "seconds": run.seconds,
            "submit_seconds": run.submit_seconds,
            "resident_bytes": run.resident_bytes,
        }

    async def do_move_pages(
        self, page_bytes: int, count: int, list_seed: int, calls: int, turns: int, imm: int | None, read: bool
    ) -> list[dict[str, float]]:
        """Run `write_page_lists` or `read_page_lists` turn by turn: so many calls in flight, each a part of one list.

        Parts have no page in common: what is in flight together lands in any order. Lists are made beforehand, so that
        turns follow each other as they do in a program that has its lists.
        """
        work = []
        for turn in range(turns):
            sources, targets = lists_of(self.memory_bytes, page_bytes, calls * count, list_seed + turn)
            work.append(list(zip(np.split(sources, calls), np.split(targets, calls), strict=True)))
        ends = (self._fabric, self._region, self._key)
        runs = [
            await pages.read_page_lists(*ends, lists, page_bytes=page_bytes)
            if read
            else await pages.write_page_lists(*ends, lists, page_bytes=page_bytes, imm=imm)
            for lists in work
        ]
        return [{"seconds": run.seconds, "call_seconds": run.call_seconds} for run in runs]

    async def do_ping_spin(self, imm: int, base: int, count: int) -> list[int]:
        """Play ping with spin; return round trips in ns."""
        return await notify.ping_spin(self._fabric, self._peer, imm, self._counter, base, count)

    async def do_pong_spin(self, imm: int, base: int, count: int) -> None:
        """Answer do_ping_spin."""
        await notify.pong_spin(self._fabric, self._peer, imm, self._counter, base, count)

    async def do_ping_await(self, imm: int, base: int, count: int) -> list[int]:
        """Play ping with await; return round trips in ns."""
        return await notify.ping_await(self._fabric, self._peer, imm, self._counter, base, count)

    async def do_pong_await(self, imm: int, base: int, count: int) -> None:
        """Answer do_ping_await."""
        await notify.pong_await(self._fabric, self._peer, imm, self._counter, base, count)

    async def do_message_ping_spin(self, length_bytes: int, count: int) -> list[int]:
        """Play ping by messages with spin; return round trips in ns."""
        return await messages.ping_spin(self._fabric, self._peer, length_bytes, count)

    async def do_message_pong_spin(self, length_bytes: int, count: int) -> None:
        """Answer do_message_ping_spin."""
        await messages.pong_spin(self._fabric, self._peer, length_bytes, count)

    async def do_message_ping_await(self, length_bytes: int, count: int) -> list[int]:
        """Play ping by messages with await; return round trips in ns."""
        return await messages.ping_await(self._fabric, self._peer, length_bytes, count)

    async def do_message_pong_await(self, length_bytes: int, count: int) -> None:
        """Answer do_message_ping_await."""
        await messages.pong_await(self._fabric, self._peer, length_bytes, count)

    async def do_send_many(self, length_bytes: int, count: int) -> int:
        """Send many messages; return the stamp before the first."""
        return await messages.send_many(self._fabric, self._peer, length_bytes, count)

    async def do_receive_many(self, count: int) -> tuple[int, bool]:
        """Take the messages of do_send_many; return the stamp after the last, and whether all was well."""
        return await messages.receive_many(self._fabric, count)

    async def do_spin_many(self, count: int) -> tuple[int, bool]:
        """Do the same by spinning."""
        return await messages.spin_many(self._fabric, count)

    async def do_write_seen(self, op_bytes: int, imm: int, base: int, count: int) -> list[int]:
        """Write and spin for the acknowledgement; return the stamps before each write."""
        return await notify.write_seen(self._fabric, self._region, self._key, imm, self._counter, base, op_bytes, count)

    async def do_see_write(self, imm: int, base: int, count: int) -> list[int]:
        """Spin for each write and acknowledge it; return the stamps after each was seen."""
        return await notify.see_write(self._fabric, self._peer, imm, self._counter, base, count)

    async def do_idle(self, seconds: float) -> float:
        """Do nothing; return the share of a core that this took."""
        return await notify.idle_share(seconds)
