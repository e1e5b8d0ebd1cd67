"""Posting: the writes of one stream, from the queue to their end. Knows no layers, no tokens and no protocol.

Runs on the event loop's thread. What finds no room in the engine waits here in order; when a stream ends, what was
posted is drained (INV-2), and whether all of that is certain to have ended on both sides is kept.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import NamedTuple

import anyio

from asyncfabric import BusyError, Fabric, FabricError, Region, RegionKey, RegionSlice, Transfer, wait_all
from asyncfabric._bridge.status import StatusCode
from asyncfabric.kv.relayout import Batch

logger: logging.Logger = logging.getLogger("asyncfabric.kv")


class Post(NamedTuple):
    """One write_pages call: a batch with byte offsets of layer 0, moved to its layer by the two offsets."""

    batch: Batch
    source_offset: int
    target_offset: int
    imm: int
    after: object


class StreamWrite(NamedTuple):
    """When one submission of a stream was under way, on time.monotonic_ns().

    Attributes:
        submitted_ns: when it was posted; one with `after` is posted before what it waits for.
        completed_ns: when it ended.
        bytes: that left for certain: all of it, unless it failed or was cancelled.
    """

    submitted_ns: int
    completed_ns: int
    bytes: int


class StreamProgress(NamedTuple):
    """How far the writes of a stream are, for people.

    Attributes:
        pieces: pieces posted.
        need: pieces to be posted in all.
        queued: submissions that wait for room in the engine.
        submitted: submissions that were posted and not yet waited for.
        acknowledged: how many of these have ended.
        ending: whether nothing more is posted.
    """

    pieces: int
    need: int
    queued: int
    submitted: int
    acknowledged: int
    ending: bool


class Posting:
    """Writes batches of a region behind a key.

    Attributes:
        pieces: pieces posted.
        bytes: bytes posted.
        clean: whether every write that ended so far has certainly ended on both sides.
        writes: those that have ended and were waited for, in the order of their submission.
    """

    def __init__(self, fabric: Fabric, region: Region, key: RegionKey, lease: int) -> None:
        """Post nothing yet; `lease` is named in logs."""
        self.pieces: int = 0
        self.bytes: int = 0
        self.clean: bool = True
        self.writes: list[StreamWrite] = []
        self._fabric = fabric
        self._region = region
        self._key = key
        self._lease = lease
        self._queue: deque[Post] = deque()
        self._transfers: list[Transfer] = []
        self._submitted_ns: list[int] = []  # of each of them

    def add(self, post: Post) -> None:
        """Queue a write; see `post`."""
        self._queue.append(post)

    def post(self) -> None:
        """Post from the queue until it is empty or the engine has no room."""
        queue, write_pages, now = self._queue, self._fabric.write_pages, time.monotonic_ns
        while queue:
            batch, source_offset, target_offset, imm, after = queue[0]
            submitted_ns = now()
            try:
                transfer = write_pages(
                    self._region,
                    batch.source_offsets,
                    self._key,
                    batch.target_offsets,
                    page_bytes=batch.length_bytes,
                    source_stride=1,  # the lists hold byte offsets
                    target_stride=1,
                    source_offset=source_offset,
                    target_offset=target_offset,
                    imm=imm,
                    after=after,
                )
            except BusyError:
                return
            self._transfers.append(transfer)
            self._submitted_ns.append(submitted_ns)
            queue.popleft()
            pieces = len(batch.source_offsets)
            self.pieces += pieces
            self.bytes += pieces * batch.length_bytes

    async def flush(self) -> None:
        """Return when the queue is empty.

        Cancellation: the rest stays in the queue.
        """
        self.post()
        while self._queue:
            await self._fabric.wait_writable()
            self.post()

    async def write(self, source: RegionSlice, key: RegionKey, imm: int) -> None:
        """Post one write of another region, behind what is queued.

        Cancellation: it is posted or not; nothing is half posted.
        """
        await self.flush()
        while True:
            submitted_ns = time.monotonic_ns()
            try:
                self._transfers.append(self._fabric.write(source, key, 0, imm=imm))
                break
            except BusyError:
                await self._fabric.wait_writable()
        self._submitted_ns.append(submitted_ns)
        self.bytes += source.length

    async def acknowledged(self) -> None:
        """Return when everything that was posted has ended; raises the first failure then.

        Cancellation: stops posting and drains, then goes on.
        """
        await wait_all(self._transfers)
        self._keep_times()

    async def drain(self) -> None:
        """Drop the queue, stop what is posted and return when it has ended; afterwards nothing reads the sources.

        Cancellation: shielded; the fabric bounds it by its drain deadline.
        """
        self._queue.clear()
        with anyio.CancelScope(shield=True):
            for transfer in self._transfers:
                transfer.cancel()
            for transfer in self._transfers:
                try:
                    await transfer
                except FabricError as error:
                    if _code(transfer) != StatusCode.CANCELLED:
                        self.clean = False
                        logger.info("a transfer of the stream to lease %d ended in doubt: %s", self._lease, error)
        self._keep_times()

    def progress(self, need: int, *, ending: bool) -> StreamProgress:
        """Return how far it is, of `need` pieces."""
        ended = sum(transfer.done for transfer in self._transfers)
        return StreamProgress(self.pieces, need, len(self._queue), len(self._transfers), ended, ending)

    def _keep_times(self) -> None:
        """Let go of the transfers, all of which have ended, and keep when they were under way."""
        for submitted_ns, transfer in zip(self._submitted_ns, self._transfers, strict=True):
            if (completion := transfer.completion) is not None:  # None: the fabric was closed before it ended
                self.writes.append(StreamWrite(submitted_ns, submitted_ns + completion.duration_ns, completion.bytes))
        self._transfers.clear()
        self._submitted_ns.clear()


def _code(transfer: Transfer) -> int:
    return transfer.completion.code if transfer.completion is not None else int(StatusCode.CLOSED)
