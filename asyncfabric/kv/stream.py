"""KvStream: the sender's side of one request. Posts pages as layers are computed; ends when nothing of it is under way.

Runs on the event loop's thread; a compute thread reaches it through its loop (trio.from_thread, run_sync_soon). `push`
never waits: what finds no room in the engine's queue is kept and posted by the next push or by `finish`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import numpy as np
from numpy.typing import NDArray

from asyncfabric import BusyError, ClosedError, Fabric, FabricError, RegionSlice, Transfer
from asyncfabric._bridge.status import StatusCode
from asyncfabric.kv.layout import KvLayout
from asyncfabric.kv.messages import KvOffer
from asyncfabric.kv.pool import KvPool
from asyncfabric.kv.relayout import Batch, KvPlan, context_rank

logger: logging.Logger = logging.getLogger("asyncfabric.kv")


class KvStream:
    """Writes pages of a local pool to the pages of an offer; made by `async with open_stream(...)`.

    Attributes:
        offer: what is streamed to.
        pieces: pieces posted so far; the target counts as many.
        bytes: bytes posted so far.
        finished: whether `finish` returned: everything of this rank has arrived.
        clean: after the end: whether it is certain that nothing of this stream can still reach the target.
    """

    def __init__(self, fabric: Fabric, pool: KvPool, offer: KvOffer, source_pages: NDArray[np.int64]) -> None:
        """Not for users: `async with open_stream(...)`."""
        self.offer = offer
        self.pieces: int = 0
        self.bytes: int = 0
        self.clean: bool = True
        self._fabric = fabric
        self._pool = pool
        self._plan = KvPlan(pool.layout, offer.layout, offer.tokens, offer.rotation)
        self._placed = self._plan.place(source_pages, offer.block_table())
        self._pages_key = pool.key_of(offer.pages_key)
        self._context_key = pool.key_of(offer.context_key) if offer.context_key else None
        self._pushed = [0] * pool.layout.layers
        self._backlog: deque[tuple[int, Batch, object]] = deque()
        self._transfers: list[Transfer] = []
        self._context_sent = False
        self._ended = False
        self._drained = False
        self.finished: bool = False
        self._check_keys()

    @property
    def layout(self) -> KvLayout:
        """The layout of the source."""
        return self._pool.layout

    @property
    def ended(self) -> bool:
        """Whether the stream is over and drained."""
        return self._drained

    @property
    def sends_context(self) -> bool:
        """Whether `finish` must be given the context: one rank of the source sends it."""
        mine = context_rank(self.layout, self.offer.rotation) == self.layout.tp_rank
        return self.layout.context_bytes > 0 and mine

    def push(self, layer: int, tokens_ready: int, *, after: object = None) -> int:
        """Post what has become complete in one layer now that its first `tokens_ready` tokens are in place.

        Each page goes once, whatever the chunks: complete pages at once, the last one with the last token. Never waits.

        Args:
            layer: the layer that was computed.
            tokens_ready: tokens in place, counted from the first of the request; grows.
            after: CUDA stream that computes them: the pages are read once it is past what it was given before.

        Returns:
            The pieces that this push added.

        Raises:
            ValueError: no such layer, or more tokens than were asked for.
            StaleKeyError: the target has revoked its keys: stop computing.
            ClosedError: the stream has ended.
        """
        if self._ended:
            raise ClosedError(f"the stream to lease {self.offer.lease} has ended; nothing more can be pushed")
        if not 0 <= layer < self.layout.layers:
            raise ValueError(f"layer must be in 0..{self.layout.layers - 1}, got {layer}")
        begin, end = self._pushed[layer], self._plan.runs_ready(tokens_ready)
        if end <= begin:
            return 0
        self._pushed[layer] = end
        if not self._plan.serves(layer):
            return 0
        batches = self._placed.batches(begin, end)
        self._backlog.extend((layer, batch, after) for batch in batches)
        self._post()
        return sum(len(batch.source_offsets) for batch in batches)

    async def finish(self, context: RegionSlice | None = None) -> None:
        """Write the context and return when every byte of this stream has left and was acknowledged.

        Args:
            context: the bytes of the context, `layout.context_bytes` of them, in registered memory; only looked at on
                the rank that sends it.

        Raises:
            ValueError: not all layers were pushed to the last token, or the context is missing or of another length.
            PeerError, TransferError, StaleKeyError: the first failure, when all transfers have ended.

        Cancellation: stops posting and drains, then goes on; the target does not get everything.
        """
        late = [layer for layer, done in enumerate(self._pushed) if done < self._plan.runs]
        if late:
            raise ValueError(
                f"layers {late[:8]} were not pushed to token {self.offer.tokens}; push them before finish()"
            )
        if self.sends_context and not self._context_sent:
            length = self.layout.context_bytes
            if context is None or context.length != length:
                got = "none" if context is None else f"{context.length} bytes"
                raise ValueError(f"rank {self.layout.tp_rank} sends a context of {length} bytes, got {got}")
        await self.flush()
        if self.sends_context and not self._context_sent:
            assert context is not None and self._context_key is not None
            while True:
                try:
                    self._transfers.append(
                        self._fabric.write(context, self._context_key, 0, imm=self.offer.context_imm)
                    )
                    break
                except BusyError:
                    await self._fabric.wait_writable()
            self._context_sent = True
            self.bytes += context.length
        await self._settled()

    async def flush(self) -> None:
        """Return when everything that was pushed is posted.

        Cancellation: the rest stays in the backlog, for the next push or finish.
        """
        self._post()
        while self._backlog:
            await self._fabric.wait_writable()
            self._post()

    async def aclose(self) -> None:
        """Stop posting, drain what is posted; afterwards nothing reads the source pages. Idempotent.

        Whether nothing can reach the target either is told by `clean`: a drained or never posted write has ended on
        both sides, one that failed with its peer may be anywhere.

        Cancellation: shielded; the fabric bounds the drain by its drain deadline.
        """
        if self._ended:
            return
        self._ended = True
        self._backlog.clear()
        with anyio.CancelScope(shield=True):
            for transfer in self._transfers:
                transfer.cancel()
            for transfer in self._transfers:
                try:
                    await transfer
                except FabricError as error:
                    if _code(transfer) != StatusCode.CANCELLED:
                        self.clean = False
                        logger.info("a transfer of the stream to lease %d ended in doubt: %s", self.offer.lease, error)
        self._transfers.clear()
        self._drained = True

    async def _settled(self) -> None:
        for transfer in self._transfers:
            await transfer
        self._transfers.clear()
        self.finished = True

    def _post(self) -> None:
        """Post from the backlog until it is empty or the engine has no room."""
        offer = self.offer
        while self._backlog:
            layer, batch, after = self._backlog[0]
            try:
                transfer = self._fabric.write_pages(
                    self._pool.region,
                    batch.source_offsets,
                    self._pages_key,
                    batch.target_offsets,
                    page_bytes=batch.length_bytes,
                    source_stride=1,  # the lists hold byte offsets
                    target_stride=1,
                    source_offset=layer * self.layout.layer_bytes(self._pool.pages),
                    target_offset=layer * offer.layout.layer_bytes(offer.pool_pages),
                    imm=offer.imm_of(layer),
                    after=after,
                )
            except BusyError:
                return
            self._transfers.append(transfer)
            self._backlog.popleft()
            self.pieces += len(batch.source_offsets)
            self.bytes += len(batch.source_offsets) * batch.length_bytes

    def _check_keys(self) -> None:
        need = self.offer.layout.pool_bytes(self.offer.pool_pages)
        if self._pages_key.length != need:
            raise ValueError(f"the key of the offer reaches {self._pages_key.length} bytes, its pool has {need}")
        if self._context_key is None:
            if self.sends_context:
                raise ValueError("the offer names no context, the layout has one")
        elif self._context_key.length != self.layout.context_bytes:
            length = self._context_key.length
            raise ValueError(f"the context slot of the offer has {length} bytes, expected {self.layout.context_bytes}")


@asynccontextmanager
async def open_stream(
    fabric: Fabric, pool: KvPool, offer: KvOffer, source_pages: NDArray[np.int64]
) -> AsyncIterator[KvStream]:
    """Open a stream to an offer, from pages of `pool`; on leaving nothing reads those pages any more.

    Args:
        fabric: the fabric of the pool.
        pool: where the source pages are.
        offer: what the target offered.
        source_pages: the source's block table, `layout.pages_for(offer.tokens)` pages or more.

    Raises:
        ValueError: layouts that cannot be planned (the field is named), keys or tables that do not fit the offer.

    Cancellation: leaving drains, shielded and bounded by the fabric's drain deadline; then it goes on.
    """
    stream = KvStream(fabric, pool, offer, source_pages)
    try:
        yield stream
    finally:
        await stream.aclose()


def _code(transfer: Transfer) -> int:
    return transfer.completion.code if transfer.completion is not None else int(StatusCode.CLOSED)
