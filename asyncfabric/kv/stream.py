"""KvStream: the sender's side of one request. Posts pages as layers are computed; ends when nothing of it is under way.

Runs on the event loop's thread; a compute thread reaches it through its loop (trio.from_thread, run_sync_soon). `push`
never waits: what finds no room in the engine's queue is kept and posted by the next push or by `finish`. Here stands
what is to be written; the writes themselves are those of `Posting`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import numpy as np
from numpy.typing import NDArray

from asyncfabric import ClosedError, Fabric, RegionSlice
from asyncfabric.kv.layout import KvLayout
from asyncfabric.kv.messages import KvOffer
from asyncfabric.kv.pool import KvPool
from asyncfabric.kv.posting import Post, Posting, StreamProgress, StreamWrite
from asyncfabric.kv.relayout import Batch, KvPlan, context_rank


class KvStream:
    """Writes pages of a local pool to the pages of an offer; made by `async with open_stream(...)`.

    Attributes:
        offer: what is streamed to.
        finished: whether `finish` returned: everything of this rank has arrived.
    """

    def __init__(self, fabric: Fabric, pool: KvPool, offer: KvOffer, source_pages: NDArray[np.int64]) -> None:
        """Not for users: `async with open_stream(...)`."""
        self.offer = offer
        self.finished: bool = False
        self._pool = pool
        self._plan = KvPlan(pool.layout, offer.layout, offer.tokens, offer.rotation)
        self._placed = self._plan.place(source_pages, offer.block_table())
        self._pages_key = pool.key_of(offer.pages_key)
        self._context_key = pool.key_of(offer.context_key) if offer.context_key else None
        self._posting = Posting(fabric, pool.region, self._pages_key, offer.lease)
        layers = range(pool.layout.layers)
        self._pushed = [0] * len(layers)
        self._served = [self._plan.serves(layer) for layer in layers]
        self._imms = [offer.imm_of(layer) for layer in layers]
        self._source_step = pool.layout.layer_bytes(pool.pages)
        self._target_step = offer.layout.layer_bytes(offer.pool_pages)
        self._context_sent = False
        self._ended = False
        self._drained = False
        self._check_keys()

    @property
    def pieces(self) -> int:
        """Pieces posted so far; the target counts as many."""
        return self._posting.pieces

    @property
    def bytes(self) -> int:
        """Bytes posted so far."""
        return self._posting.bytes

    @property
    def writes(self) -> tuple[StreamWrite, ...]:
        """When each submission was under way, in the order of submission: after `finish` of all, before that of none.

        After a stream that ended without `finish` these are the ones that were posted, cancelled ones among them.
        """
        return tuple(self._posting.writes)

    @property
    def clean(self) -> bool:
        """After the end: whether it is certain that nothing of this stream can still reach the target."""
        return self._posting.clean

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
            raise self._over()
        if not 0 <= layer < len(self._pushed):
            raise self._no_layer(layer)
        end = self._plan.runs_ready(tokens_ready)
        begin = self._pushed[layer]
        if end <= begin:
            return 0
        self._pushed[layer] = end
        if not self._served[layer]:
            return 0
        posting, pieces = self._posting, 0
        offsets = layer * self._source_step, layer * self._target_step
        for batch in self._placed.batches(begin, end):
            posting.add(Post(batch, *offsets, self._imms[layer], after))
            pieces += len(batch.source_offsets)
        posting.post()
        return pieces

    def push_layers(self, layers: Iterable[int], tokens_ready: int, *, after: object = None) -> int:
        """Post several layers of which as many tokens are in place, in as few submissions as can be.

        Layers that have one counter (an offer without `per_layer`) and were pushed equally far go together; each other
        one goes as if by `push`.

        Args:
            layers: the layers that were computed.
            tokens_ready: tokens in place in each of them, counted from the first of the request; grows.
            after: as for `push`, of all of them.

        Returns:
            The pieces that this push added.

        Raises:
            ValueError, StaleKeyError, ClosedError: as for `push`; of a layer that does not exist nothing is posted.
        """
        if self._ended:
            raise self._over()
        end = self._plan.runs_ready(tokens_ready)
        groups: dict[tuple[int, int], list[int]] = {}
        for layer in dict.fromkeys(layers):
            if not 0 <= layer < len(self._pushed):
                raise self._no_layer(layer)
            if self._pushed[layer] < end:
                groups.setdefault((self._pushed[layer], self._imms[layer]), []).append(layer)
        pieces = 0
        for (begin, imm), group in groups.items():
            pieces += self._queue(group, begin, end, imm, after)
        self._posting.post()
        return pieces

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
        await self._posting.flush()
        if self.sends_context and not self._context_sent:
            assert context is not None and self._context_key is not None
            await self._posting.write(context, self._context_key, self.offer.context_imm)
            self._context_sent = True
        await self._posting.acknowledged()
        self.finished = True

    async def flush(self) -> None:
        """Return when everything that was pushed is posted.

        Cancellation: the rest stays in the backlog, for the next push or finish.
        """
        await self._posting.flush()

    async def aclose(self) -> None:
        """Stop posting, drain what is posted; afterwards nothing reads the source pages. Idempotent.

        Whether nothing can reach the target either is in `clean`: a drained or never posted write has ended on both
        sides, one that failed with its peer may be anywhere.

        Cancellation: shielded; the fabric bounds the drain by its drain deadline.
        """
        if self._ended:
            return
        self._ended = True
        await self._posting.drain()
        self._drained = True

    def progress(self) -> StreamProgress:
        """Return how far the pages are, the context left out."""
        need = self._plan.pieces * sum(self._served)
        return self._posting.progress(need, ending=self._ended)

    def _queue(self, layers: list[int], begin: int, end: int, imm: int, after: object) -> int:
        """Queue runs begin .. end - 1 of layers with one counter, in one write for each length; return the pieces."""
        for layer in layers:
            self._pushed[layer] = end
        moved = np.array([layer for layer in layers if self._served[layer]], np.int64)[:, None]
        if not len(moved):
            return 0
        pieces = 0
        for length, sources, targets in self._placed.batches(begin, end):
            sources = (moved * self._source_step + sources).reshape(-1)
            targets = (moved * self._target_step + targets).reshape(-1)
            self._posting.add(Post(Batch(length, sources, targets), 0, 0, imm, after))
            pieces += len(sources)
        return pieces

    def _over(self) -> ClosedError:
        return ClosedError(f"the stream to lease {self.offer.lease} has ended; nothing more can be pushed")

    def _no_layer(self, layer: int) -> ValueError:
        return ValueError(f"layer must be in 0..{len(self._pushed) - 1}, got {layer}")

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
