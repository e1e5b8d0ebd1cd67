"""KvLease: pages, a context slot, counters and a deadline, owned by one request. The leaseholder's handle.

Runs on the event loop's thread. A lease knows its pages and how many arrivals to wait for; who may write and when the
pages are free again is kept by the pool's ledger, messages are the inbox's work.
"""

from __future__ import annotations

import math
from types import TracebackType
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
from numpy.typing import NDArray

from asyncfabric import ClosedError, ImmCounter, Peer, RegionSlice, StaleKeyError
from asyncfabric.kv.layout import KvLayout
from asyncfabric.kv.messages import KvOffer, pack_pages
from asyncfabric.kv.relayout import expected_arrivals

if TYPE_CHECKING:
    from asyncfabric.kv.pool import KvPool

FOREVER_NS = (1 << 62) - 1


class KvLease:
    """Pages of a pool, made by `await pool.lease(...)`; give it back with `release()` or by leaving `async with`.

    Attributes:
        number: number of the lease in its pool; grows.
        owner: what the lease is for, as text; named when pages leak.
        pages: the block table, one page number per `page_tokens` tokens.
        slot: the context slot, -1 without one.
        deadline: on the clock of the event loop (anyio.current_time()), infinite without one.
    """

    def __init__(
        self, pool: KvPool, number: int, owner: str, pages: NDArray[np.int64], slot: int, deadline: float
    ) -> None:
        """Not for users: `await pool.lease(...)`."""
        self.pool = pool
        self.number = number
        self.owner = owner
        self.pages = pages
        self.slot = slot
        self.deadline = deadline
        self._expected: NDArray[np.int64] = np.zeros(0, np.int64)
        self._contexts = 0
        self._counters: list[ImmCounter] = []
        self._interrupted = False
        self._released = False

    @property
    def released(self) -> bool:
        """Whether the lease was given back."""
        return self._released

    @property
    def exposed(self) -> bool:
        """Whether a remote writer may write to the pages, by what is known."""
        return not self._released and self.number in self.pool.ledger.exposed

    @property
    def expected(self) -> int:
        """Arrivals that mean that everything is here: pieces of all layers from all sources, and the context."""
        return int(self._expected.sum()) + self._contexts

    @property
    def imms(self) -> tuple[int, ...]:
        """Immediates that count the arrivals; empty before the offer."""
        return tuple(counter.imm for counter in self._counters)

    @property
    def arrived(self) -> int:
        """Arrivals so far."""
        if self._interrupted or self._released:
            return 0
        return sum(counter.value for counter in self._counters)

    def arrived_all(self) -> bool:
        """Return whether everything that was offered has arrived."""
        counts = self._expected.tolist() if len(self._counters) > 1 else [self.expected]
        if len(self._counters) > 1 and self._contexts:
            counts.append(1)
        if not self._counters or self._interrupted or self._released:
            return False
        return all(counter.value >= count for counter, count in zip(self._counters, counts, strict=True))

    @property
    def context(self) -> RegionSlice:
        """The context slot as a part of the pool's context region; raises ValueError without one."""
        return self.pool.context_slice(self.slot)

    def page(self, layer: int, index: int) -> NDArray[Any]:
        """Return a numpy view of the bytes of one page: entry `index` of the block table in a layer."""
        return self.pool.page(layer, int(self.pages[index]))

    async def offer(
        self,
        source: KvLayout,
        tokens: int,
        *,
        rotation: int = 0,
        per_layer: bool = False,
        trace: str = "",
        body: bytes = b"",
    ) -> KvOffer:
        """Expose the pages to remote writers and return the offer that lets each source rank write to them.

        From here on the pages are reused only with proof that nobody writes any more (KV-1).

        Args:
            source: the layout of any rank of the source; all its ranks get the same offer.
            tokens: tokens that the source is to deliver, at most as many as the pages hold.
            rotation: see relayout; other numbers for other requests share the load of replicated heads.
            per_layer: count each layer by itself, for `wait_layer`; costs one counter per layer.
            trace: W3C trace context; see asyncfabric.observe.spans.TraceContext.
            body: carried to the source, not looked at.

        Raises:
            ValueError: layouts that cannot be planned (the field is named), or more tokens than the pages hold.
            ClosedError: the lease was given back, or offered already.

        Cancellation: waiting for a fence under way ends; nothing was exposed.
        """
        layout, pool = self.pool.layout, self.pool
        difference = source.difference(layout)
        if difference is not None:
            raise ValueError(f"pages of the source cannot be moved into this pool, the layouts differ in {difference}")
        if not 1 <= tokens <= len(self.pages) * layout.page_tokens:
            raise ValueError(f"tokens must be in 1..{len(self.pages) * layout.page_tokens} (the pages), got {tokens}")
        if layout.context_bytes and self.slot < 0:
            raise ValueError(f"the layout has a context of {layout.context_bytes} bytes; lease with context=True")
        await pool.until_exposable()
        if self._released or self._counters:
            raise ClosedError(f"{self!r} was released or offered already", remedy="take a new lease for each offer")
        self._expected = expected_arrivals(source, layout, tokens, rotation)
        self._contexts = 1 if layout.context_bytes else 0
        fabric = pool.fabric
        for _ in range(layout.layers if per_layer else 1):
            self._counters.append(fabric.counter())
        layer_imms = tuple(counter.imm for counter in self._counters)
        if per_layer and self._contexts:
            self._counters.append(fabric.counter())
        left = self.deadline - anyio.current_time()
        offer = KvOffer(
            target=fabric.address.incarnation,
            lease=self.number,
            reply_to=bytes(fabric.address),
            layout=layout,
            digest=layout.digest(),
            tokens=tokens,
            rotation=rotation,
            pages=pack_pages(self.pages[: layout.pages_for(tokens)]),
            pool_pages=pool.pages,
            pages_key=bytes(pool.region.key(access="write")),
            context_key=bytes(self.context.key(access="write")) if self._contexts else b"",
            layer_imms=layer_imms,
            context_imm=self._counters[-1].imm,
            remaining_ns=FOREVER_NS if math.isinf(left) else max(0, int(left * 1e9)),
            trace=trace,
            body=body,
        )
        pool.ledger.expose(self.number)
        return offer

    async def wait(self, peers: list[Peer] | None = None) -> None:
        """Return when everything has arrived; the pages are then nobody's but the lease's.

        Args:
            peers: the sources; losing one of them before everything is here ends the wait.

        Raises:
            PeerError: one of `peers` is lost.
            StaleKeyError: the pool was fenced meanwhile, so the rest will not come.
            ClosedError: the lease was given back, or nothing was offered.

        Cancellation: only this wait ends; what is under way goes on arriving.
        """
        self._check_offered()
        try:
            if len(self._counters) == 1:
                await self._counters[0].wait(self.expected, peers)
            else:
                for layer in range(len(self._expected)):
                    await self._counters[layer].wait(int(self._expected[layer]), peers)
                if self._contexts:
                    await self._counters[-1].wait(1, peers)
        except ClosedError:
            self._check_offered()
            raise
        self.unexpose()

    async def wait_layer(self, layer: int, peers: list[Peer] | None = None) -> None:
        """Return when all pages of one layer have arrived.

        Raises:
            ValueError: no such layer, or the lease was offered without `per_layer`.
            PeerError, StaleKeyError, ClosedError: as for `wait`.

        Cancellation: as for `wait`.
        """
        self._check_offered()
        if not 0 <= layer < len(self._expected):
            raise ValueError(f"layer must be in 0..{len(self._expected) - 1}, got {layer}")
        if len(self._expected) > 1 and len(self._counters) == 1:
            raise ValueError("layers are not counted one by one: offer with per_layer=True to wait for one")
        target = self.expected if len(self._counters) == 1 else int(self._expected[layer])
        try:
            await self._counters[layer].wait(target, peers)
        except ClosedError:
            self._check_offered()
            raise

    def unexpose(self) -> None:
        """Note the proof that no writer is left: everything arrived, or every source confirmed that it stopped."""
        if self._released:
            self.pool.confirm(self.number)
        elif self.exposed:
            self.pool.ledger.unexpose(self.number)
            self.pool.look()

    def release(self) -> bool:
        """Give pages, slot and counters back; returns whether they are free. Idempotent.

        Pages that a source may still write to are quarantined, and free again when it confirmed or the pool was fenced.
        """
        if self._released:
            return self.number not in self.pool.ledger.quarantined
        self._released = True
        self._close_counters()
        return self.pool.take_back(self)

    def interrupt(self) -> None:
        """The pool was fenced: wake who waits, with StaleKeyError. Called by the pool."""
        self._interrupted = True
        self._close_counters()

    def _close_counters(self) -> None:
        for counter in self._counters:
            counter.close()

    def _check_offered(self) -> None:
        if self._interrupted:
            raise StaleKeyError(
                f"{self!r}: the keys of the pool were revoked to fence off a lost source, so the rest will not arrive",
                remedy="release the lease and ask again with a new one; nothing else is broken",
            )
        if self._released or not self._counters:
            raise ClosedError(f"{self!r} was {'released' if self._released else 'not offered'}")

    async def __aenter__(self) -> KvLease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<KvLease {self.number} of {self.owner}: {len(self.pages)} pages>"
