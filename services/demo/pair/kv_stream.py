"""The sender's side of one request: posts pages as layers are computed, and ends only when all has left its memory.

Runs on the event loop. What the leaseholder waits for is the count; nothing here says "done" to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import trio

import asyncfabric as af
from asyncfabric_services.demo.pair.node import Node
from asyncfabric_services.demo.pair.protocol import Lease


class KvStream:
    """Writes leased pages `source` of this node to the pages that `lease` names."""

    def __init__(self, node: Node, source: list[int], lease: Lease) -> None:
        """Open the keys of the lease; raises ValueError for malformed ones."""
        self._node = node
        self._layout = node.loaded.layout
        self._source = np.array(source, dtype=np.int64)
        self._target = np.array(lease.pages, dtype=np.int64)
        self._lease = lease
        self._pages_key = node.key_of(lease.pages_key)
        self._context_key = node.key_of(lease.context_key)
        self._transfers: list[tuple[int, af.Transfer]] = []
        self.pages = 0
        self.bytes = 0

    async def push_layer(self, layer: int, pages: range, after: object = None) -> None:
        """Post the pages of the block table that are complete in one layer, or will be at the moment `after`.

        Cancellation: pages are posted all or not at all; `drain` must still be called.
        """
        if not pages:
            return
        entries = slice(pages.start, pages.stop)
        await self._submit(
            lambda: self._node.fabric.write_pages(
                self._node.pages_region,
                self._source[entries] + layer * self._node.pool.pages,
                self._pages_key,
                self._target[entries] + layer * self._lease.pool_pages,
                page_bytes=self._layout.page_bytes,
                imm=self._lease.imm,
                after=after,
            )
        )
        self.pages += len(pages)
        self.bytes += len(pages) * self._layout.page_bytes

    async def push_context(self) -> None:
        """Post the context, which counts as one arrival more.

        Cancellation: as push_layer.
        """
        context = self._node.context_region
        await self._submit(lambda: self._node.fabric.write(context, self._context_key, 0, imm=self._lease.imm))
        self.bytes += context.length

    async def drain(self) -> list[tuple[int, int]]:
        """Wait for every transfer; return (submitted, completed) in ns of each, raise the first failure at the end.

        Cancellation: shielded, because the pages must not be reused before; the fabric bounds it by its drain deadline.
        """
        spans: list[tuple[int, int]] = []
        failure: Exception | None = None
        with trio.CancelScope(shield=True):
            for submitted, transfer in self._transfers:
                try:
                    result = await transfer
                    spans.append((submitted, submitted + int(result.duration * 1e9)))
                except af.FabricError as error:
                    failure = failure or error
        self._transfers.clear()
        if failure is not None:
            raise failure
        return spans

    def cancel(self) -> None:
        """Have what has not left its memory stay there; `drain` must still be called."""
        for _, transfer in self._transfers:
            transfer.cancel()

    async def _submit(self, post: Callable[[], af.Transfer]) -> None:
        while True:
            submitted = time.monotonic_ns()
            try:
                self._transfers.append((submitted, post()))
                return
            except af.BusyError:
                await self._node.fabric.wait_writable()
