"""A measured process with a KvPool: offers leases, or streams to them. Offers travel through the coordinator.

The pool lives in a task beside the calls, since it has tasks of its own.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import numpy as np
import trio

from asyncfabric import Region
from asyncfabric.bench.pattern import POISON, random_bytes, verdict
from asyncfabric.kv import KvLease, KvOffer, KvPool, decode_message, encode_message, open_pool
from asyncfabric_services.bench.kv.workload import layout_of, stream_layers, write_layers
from asyncfabric_services.bench.transfers.fabric_worker import FabricWorker, MemoryKind


class KvWorker(FabricWorker):
    """One fabric and one pool; opened by `do_open` and `do_pool`."""

    _pool: KvPool
    _lease: KvLease

    def __init__(self, meeting: int = -1) -> None:
        """Open nothing yet."""
        super().__init__(meeting)
        self._wanted: trio.MemorySendChannel[dict[str, Any]]
        self._wanted, self._orders = trio.open_memory_channel[dict[str, Any]](1)
        self._opened = trio.Event()
        self._failure: Exception | None = None

    @property
    def device(self) -> str:
        """Return where a pool is allocated."""
        return "cpu"

    def foreign(self, length_bytes: int) -> object:
        """Return memory of this process for a pool."""
        return np.empty(length_bytes, dtype=np.uint8)

    def take(self, region: Region) -> None:
        """Keep the memory of a pool as what calls fill and check."""
        self.memory = np.frombuffer(region.memory, dtype=np.uint8)

    async def beside(self) -> None:
        """Keep pools open, one after the other as they are asked for, until the process ends."""
        order = await self._orders.receive()
        while True:
            try:
                layout = layout_of(order["page_bytes"], order["layers"])
                length = layout.pool_bytes(order["pages"])
                where: dict[str, Any] = {"device": self.device}
                if order["kind"] == "foreign":
                    where = {"buffer": self.foreign(length)}
                opened = open_pool(self._fabric, layout, pages=order["pages"], seed=order["seed"], **where)
                async with opened as self._pool:
                    self.take(self._pool.region)
                    self._opened.set()
                    order = await self._orders.receive()
            except Exception as error:
                self._failure = error
                self._opened.set()
                return

    async def do_pool(
        self, kind: MemoryKind, page_bytes: int, layers: int, pages: int, seed: int, fill: int | None
    ) -> None:
        """Open a pool, filled with the random bytes of a seed, or with poison; closes the one before."""
        self._opened = trio.Event()
        shape = {"page_bytes": page_bytes, "layers": layers, "pages": pages}
        await self._wanted.send(shape | {"kind": kind, "seed": seed})
        await self._opened.wait()
        if self._failure is not None:
            raise self._failure
        if fill is None:
            await self.do_poison()
        else:
            await self.do_fill(fill)

    async def do_offer(self, pages: int) -> str:
        """Lease pages and return the offer to fill all of them."""
        layout = self._pool.layout
        self._lease = await self._pool.lease("bench", pages=pages)
        return encode_message(await self._lease.offer(layout, pages * layout.page_tokens)).hex()

    async def do_receive(self) -> int:
        """Wait until everything has arrived; returns when that was, on the monotonic clock. Gives the lease back."""
        await self._lease.wait()
        arrived = time.monotonic_ns()
        self._lease.release()
        return arrived

    async def do_stream(self, offer: str, chunks: int, together: bool, bare: bool) -> dict[str, Any]:
        """Stream to an offer from as many pages of the own pool, or write the same pages with bare calls."""
        message = decode_message(bytes.fromhex(offer))
        assert isinstance(message, KvOffer)
        async with await self._pool.lease("bench", tokens=message.tokens) as lease:
            if bare:
                run = await write_layers(self._pool, message, lease.pages, chunks=chunks)
            else:
                run = await stream_layers(self._pool, message, lease.pages, chunks=chunks, together=together)
        return asdict(run) | {"source_pages": lease.pages.tolist()}

    async def do_check_stream(self, seed: int, source_pages: list[int]) -> str:
        """Check that the last lease holds those pages of the sender's seed, and all else poison; "" is good."""
        layout, pool = self._pool.layout, self._pool
        shape = (layout.layers, pool.pages, layout.page_bytes)
        sent = random_bytes(self.memory_bytes, seed).reshape(shape)
        expected = np.full(shape, POISON, dtype=np.uint8)
        expected[:, self._lease.pages] = sent[:, source_pages]
        return verdict(self.content(), expected.reshape(-1))
