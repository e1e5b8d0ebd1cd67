"""One node of a streaming test: leases and streams pages as ordered by JSON lines, answers each with one JSON line.

Both ends of the protocol live in each node. A source streams what it is asked for in the offer's body: `gated` layers
wait for `allow`; `deaf` sources do not stop when they are ordered to, and write again when they are allowed. Streamed
bytes are 0x80 and above, poison is below.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import time
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import trio
from json_lines import answer, lines

import asyncfabric as af
from asyncfabric.kv import KvJob, KvLayout, deliver, open_inbox, open_kv_channel, open_outbox, open_pool

PR_SET_PDEATHSIG = 1


def value_of(layer: int, index: int) -> int:
    return 0x80 | (layer * 13 + index * 5) & 0x7F


class Node:
    def __init__(self, fabric: af.Fabric, pool: Any, inbox: Any, stack: AsyncExitStack) -> None:
        self.fabric = fabric
        self.pool = pool
        self.inbox = inbox
        self.outbox: Any = None
        self.leases: dict[str, Any] = {}
        self.requests: dict[str, Any] = {}
        self.exits: dict[str, AsyncExitStack] = {}
        self.gate = trio.Semaphore(0)
        self.posted_all = trio.Event()
        self.served = 0
        self.unclean = 0
        self.refused: list[str] = []

    async def serve(self, job: KvJob) -> None:
        """Stream what is asked for."""
        wish = json.loads(job.offer.body)
        with trio.CancelScope(shield=wish.get("deaf", False)):
            await self._serve(job, wish)

    async def _serve(self, job: KvJob, wish: dict[str, Any]) -> None:
        layout = self.pool.layout
        async with await self.pool.lease("prefill", tokens=job.offer.tokens, context=True) as lease:
            for layer in range(layout.layers):
                for index in range(len(lease.pages)):
                    lease.page(layer, index)[:] = value_of(layer, index)
            lease.context.memory[:] = b"\x99" * layout.context_bytes
            streams = []
            try:
                async with job.open_stream(lease.pages) as stream:
                    streams.append(stream)
                    for layer in range(layout.layers):
                        if wish.get("gated"):
                            await self.gate.acquire()
                        stream.push(layer, job.offer.tokens)
                        await trio.lowlevel.checkpoint()
                    self.posted_all.set()
                    await stream.finish(lease.context)
            except af.FabricError:
                if not wish.get("deaf"):
                    raise
                await self._write_again(job, lease)
            finally:
                self.served += 1
                self.unclean += sum(not stream.clean for stream in streams)

    async def _write_again(self, job: KvJob, lease: Any) -> None:
        """Be stubborn: with the old key, after the leaseholder has hung up, once it is allowed."""
        await self.gate.acquire()
        size = self.pool.layout.page_bytes
        key = af.RegionKey.from_bytes(job.offer.pages_key)
        try:
            await self.fabric.connect(job.offer.reply_to)
            await self.fabric.write_pages(
                self.pool.region, lease.pages, key, job.offer.block_table(), page_bytes=size, imm=job.offer.imm_of(0)
            )
        except af.FabricError as error:
            self.refused.append(type(error).__name__)

    async def about(self) -> dict[str, Any]:
        return {"address": bytes(self.fabric.address).hex()}

    async def request(self, address: str, tokens: int, name: str, **wish: Any) -> dict[str, Any]:
        """Lease pages and offer them; the request stays open until `leave`."""
        stack = AsyncExitStack()
        deadline = trio.current_time() + wish.pop("seconds") if "seconds" in wish else math.inf
        lease = await self.pool.lease(name, tokens=tokens, context=True, deadline=deadline)
        source = af.FabricAddress.from_bytes(bytes.fromhex(address))
        body = json.dumps(wish).encode()
        opened = self.inbox.request(lease, [source], self.pool.layout, tokens, body=body)
        self.requests[name] = await stack.enter_async_context(opened)
        self.leases[name], self.exits[name] = lease, stack
        return {"expected": lease.expected}

    async def wait(self, name: str) -> dict[str, Any]:
        """Wait for everything and check each byte."""
        await self.requests[name].wait()
        lease, layout = self.leases[name], self.pool.layout
        wrong = 0
        for layer in range(layout.layers):
            for index in range(len(lease.pages)):
                wrong += int((lease.page(layer, index) != value_of(layer, index)).sum())
        wrong += bytes(lease.context.memory).count(0x99) != layout.context_bytes
        return {"arrived": lease.arrived, "wrong": wrong, "exposed": lease.exposed}

    async def until(self, name: str, arrived: int) -> dict[str, Any]:
        """Wait until so many pieces have arrived."""
        return {"arrived": await self.leases[name]._counters[0].wait(arrived)}

    async def leave(self, name: str) -> dict[str, Any]:
        """Leave the request, which cancels what is not complete, and release the lease."""
        begin = time.monotonic()
        await self.exits.pop(name).aclose()
        exposed = self.leases[name].exposed
        return {"exposed": exposed, "free": self.leases.pop(name).release(), "seconds": time.monotonic() - begin}

    async def everything(self) -> dict[str, Any]:
        """Wait until every page is free, then fill them with poison."""
        async with await self.pool.lease("everything", pages=self.pool.pages):
            np.frombuffer(self.pool.region.memory, np.uint8)[:] = 0x11
        report = self.pool.report()
        return {"free": report.free, "quarantined": report.quarantined, "fences": self.pool.revoker.fences}

    async def report(self) -> dict[str, Any]:
        report = self.pool.report()
        return {"free": report.free, "quarantined": report.quarantined}

    async def foreign(self) -> dict[str, Any]:
        """Count bytes that somebody wrote over the poison."""
        return {"bytes": int((np.frombuffer(self.pool.region.memory, np.uint8) != 0x11).sum())}

    async def allow(self, layers: int) -> dict[str, Any]:
        for _ in range(layers):
            self.gate.release()
        return {}

    async def posted(self) -> dict[str, Any]:
        """Wait until a stream has pushed its last layer."""
        await self.posted_all.wait()
        return {}

    async def drained(self) -> dict[str, Any]:
        """Wait until nothing is served here any more."""
        await self.outbox.drained()
        report = self.pool.report()
        free = report.free == report.pages
        return {"served": self.served, "unclean": self.unclean, "free": free, "refused": self.refused}


async def main() -> None:
    commands = lines()
    first = json.loads(await anext(commands))
    config = af.FabricConfig(rails=tuple(first["rails"]), **first.get("options", {}))
    layout = KvLayout(**first["layout"])
    async with AsyncExitStack() as stack:
        fabric = await stack.enter_async_context(af.open_fabric(config))
        pool = await stack.enter_async_context(
            open_pool(fabric, layout, pages=first["pages"], contexts=4, seed=os.getpid())
        )
        channel = await stack.enter_async_context(open_kv_channel(fabric))
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        inbox = await stack.enter_async_context(open_inbox(fabric, pool, channel, confirm_s=first["confirm_s"]))
        node = Node(fabric, pool, inbox, stack)
        node.outbox = await stack.enter_async_context(open_outbox(fabric, pool, channel, node.serve))
        nursery.start_soon(deliver, channel, [inbox, node.outbox])
        answer(await node.about())
        async for line in commands:
            command = json.loads(line)
            name = command.pop("do")
            if name == "close":
                break
            try:
                result = await getattr(node, name)(**command)
            except (af.FabricError, ValueError, TimeoutError) as error:
                result = {"error": type(error).__name__, "text": str(error), "at": time.monotonic()}
            answer(result)
    answer({"closed": True})


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 9)  # no orphan survives the test that started it
    trio.run(main)
