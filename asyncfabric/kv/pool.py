"""KvPool: registered paged memory, who may have pages of it next, and views of them.

Runs on the event loop's thread. Pages are a view of one region, layer after layer. The books are the ledger's, the
fence is the key revoker's, how a pool is opened stands in `opening`; messages and streams do not belong here.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING

import anyio
import numpy as np
from numpy.typing import NDArray

from asyncfabric import BusyError, ClosedError, Fabric, Region, RegionKey, RegionSlice
from asyncfabric.kv.layout import KvLayout
from asyncfabric.kv.lease import KvLease
from asyncfabric.kv.ledger import LedgerReport, PageLedger
from asyncfabric.kv.revoker import KeyRevoker

if TYPE_CHECKING:
    import torch

logger: logging.Logger = logging.getLogger("asyncfabric.kv")

KEYS_KEPT = 1024
"""Keys of peers that stay opened: one for each pool that is streamed to, and one for each of its context slots."""

_numbers = count()
"""Lease numbers of the process: they name leases on the wire, where two pools of one fabric must not be mixed up."""


class PageTicket:
    """One task that waits for pages.

    Attributes:
        owner, pages, slots, deadline: what the lease is to be.
        since: when it began to wait, on time.monotonic().
        event, granted: how the pool answers.
    """

    __slots__ = ("deadline", "event", "granted", "owner", "pages", "since", "slots")

    def __init__(self, owner: str, pages: int, slots: int, deadline: float) -> None:
        self.owner: str = owner
        self.pages: int = pages
        self.slots: int = slots
        self.deadline: float = deadline
        self.since: float = monotonic()
        self.event: anyio.Event = anyio.Event()
        self.granted: KvLease | None = None


class KvPool:
    """Paged memory that leases are taken from; made by `async with open_pool(...)`.

    Attributes:
        fabric, layout: whose memory, and how a page lies in it.
        pages: pages of one layer; a lease's page stands for this page of every layer.
        region: the registered memory, `layout.pool_bytes(pages)` bytes.
        context_region: `contexts` slots of `layout.context_bytes`, or None.
        ledger: who holds what.
        revoker: wins quarantined pages back.
    """

    def __init__(
        self, fabric: Fabric, layout: KvLayout, pages: int, region: Region, contexts: Region | None, ledger: PageLedger
    ) -> None:
        """Not for users: `async with open_pool(...)`."""
        self.fabric = fabric
        self.layout = layout
        self.pages = pages
        self.region = region
        self.context_region = contexts
        self.ledger = ledger
        self.revoker: KeyRevoker = KeyRevoker(ledger, region, contexts)
        self._leases: dict[int, KvLease] = {}
        self._keys: dict[bytes, RegionKey] = {}
        self._queue: deque[PageTicket] = deque()
        self._closed = False
        on_host = region.device == "cpu"
        flat = np.frombuffer(region.memory, np.uint8) if on_host else None
        self._bytes = None if flat is None else flat.reshape(layout.layers, pages, layout.page_bytes)

    @property
    def queue(self) -> tuple[PageTicket, ...]:
        """Tasks that wait for pages, the next one first."""
        return tuple(self._queue)

    async def lease(
        self,
        owner: str,
        *,
        tokens: int | None = None,
        pages: int | None = None,
        context: bool = False,
        deadline: float = math.inf,
    ) -> KvLease:
        """Wait for pages and return them as a lease. First come, first served: a large request is never overtaken.

        Args:
            owner: what the pages are for, as text.
            tokens: so many tokens must fit; or
            pages: so many pages.
            context: take a context slot too.
            deadline: when the request is given up, on the clock of the event loop; carried into offers.

        Raises:
            ValueError: more than the pool has, or neither tokens nor pages.
            ClosedError: the pool is closed, also when that happens during the wait.

        Cancellation: the place in the queue is given up, or the pages just granted go back.
        """
        ticket = self._ticket(owner, tokens, pages, context, deadline)
        await anyio.lowlevel.checkpoint()
        self._check_open()
        self._queue.append(ticket)
        self._serve()
        try:
            await ticket.event.wait()
        except BaseException:
            if ticket.granted is not None:
                ticket.granted.release()
            elif not ticket.event.is_set():  # closing the pool empties the queue
                self._queue.remove(ticket)
                self._serve()
            raise
        if ticket.granted is None:
            raise ClosedError(f"the pool was closed while {owner} waited for {ticket.pages} pages")
        return ticket.granted

    def lease_nowait(
        self,
        owner: str,
        *,
        tokens: int | None = None,
        pages: int | None = None,
        context: bool = False,
        deadline: float = math.inf,
    ) -> KvLease:
        """Return a lease at once; raises BusyError when pages are missing or others wait, otherwise as `lease`."""
        ticket = self._ticket(owner, tokens, pages, context, deadline)
        self._check_open()
        if self._queue or self.revoker.holds_back():
            raise BusyError(
                f"{owner} wants {ticket.pages} pages, {len(self._queue)} others wait for theirs",
                remedy="await pool.lease(), which keeps the order",
            )
        return self._grant(ticket)

    def extend_nowait(self, lease: KvLease, pages: int) -> None:
        """Give a lease more pages, for an answer that grows; raises BusyError when there are none to spare.

        Raises:
            ValueError: a negative number of pages, or a lease of another pool.
            ClosedError: the lease was given back, or the pool is closed.
        """
        self._check_open()
        if lease.pool is not self:
            raise ValueError(f"{lease!r} is a lease of another pool")
        if pages < 0:
            raise ValueError(f"pages must be 0 or more, got {pages}")
        if lease.released:
            raise ClosedError(f"{lease!r} was released")
        if self._queue:
            raise BusyError(f"{lease!r} wants {pages} more pages, {len(self._queue)} others wait for theirs")
        lease.pages = np.concatenate((lease.pages, self.ledger.extend(lease.number, pages)))

    def page(self, layer: int, page: int) -> NDArray[np.uint8]:
        """Return a writable numpy view of the bytes of one page; raises ValueError for memory of a GPU."""
        if self._bytes is None:
            raise ValueError(f"the pool is memory of {self.region.device}; use tensor()")
        self.layout.page_offset(layer, page, self.pages)
        view: NDArray[np.uint8] = self._bytes[layer, page]
        return view

    def tensor(self) -> torch.Tensor:
        """Return the whole pool as a tensor [layers][pages][...page_shape], without a copy."""
        import torch

        dtype = getattr(torch, self.layout.dtype)
        return self.region.tensor(dtype, (self.layout.layers, self.pages, *self.layout.page_shape))

    def context_slice(self, slot: int) -> RegionSlice:
        """Return a context slot; raises ValueError when there is none of this number."""
        size = self.layout.context_bytes
        if self.context_region is None or not 0 <= slot < self.ledger.slots:
            raise ValueError(f"there is no context slot {slot}; the pool has {self.ledger.slots}")
        return self.context_region[slot * size : (slot + 1) * size]

    def report(self) -> LedgerReport:
        """Return where every page is; raises InternalError when the books do not add up."""
        return self.ledger.report()

    def owners(self) -> dict[str, int]:
        """Return how many pages each owner holds: what leaked, when nobody should hold any."""
        found: dict[str, int] = {}
        for lease in self._leases.values():
            found[lease.owner] = found.get(lease.owner, 0) + len(lease.pages)
        return found

    async def fence(self) -> None:
        """Revoke every key to the pool and return when no write under an old key can arrive any more.

        Frees what is quarantined. Leases that are still receiving fail with StaleKeyError: the key revoker therefore
        waits for a moment without any, and calling this is for those who cannot wait.

        Raises:
            FabricError: the engine could not promise it; the pages stay quarantined and nothing is exposed until a
                later fence succeeds.

        Cancellation: only the wait ends; nothing is freed, and the key revoker fences again.
        """
        self._check_open()
        for number in await self.revoker.fence():
            if (lease := self._leases.get(number)) is not None:
                lease.interrupt()
        self._serve()

    async def until_exposable(self) -> None:
        """Return when pages may be offered: not while keys are being revoked.

        Cancellation: only this wait ends.
        """
        await self.revoker.until_open()
        self._check_open()

    def key_of(self, data: bytes) -> RegionKey:
        """Return a peer's key from its bytes; the same bytes give the same object, so that its owner is asked once.

        Raises:
            ValueError: the bytes are no key.
        """
        key = self._keys.pop(data, None) or RegionKey.from_bytes(data)
        self._keys[data] = key  # the newest at the end
        if len(self._keys) > KEYS_KEPT:
            del self._keys[next(iter(self._keys))]
        return key

    def take_back(self, lease: KvLease) -> bool:
        """Take the pages of a lease back; called by KvLease.release."""
        self._leases.pop(lease.number, None)
        free = self.ledger.release(lease.number)
        if not free:
            self.revoker.quarantined()
            logger.info("%r: %d pages are quarantined until its sources confirm or are fenced", lease, len(lease.pages))
        self._serve()
        self.look()
        return free

    def confirm(self, number: int) -> None:
        """A late proof for a lease that was given back already: free its quarantined pages."""
        if self.ledger.confirm(number):
            self.revoker.freed()
            self._serve()

    def look(self) -> None:
        """Something changed: let the key revoker look whether it can fence now."""
        self.revoker.look()

    def _ticket(self, owner: str, tokens: int | None, pages: int | None, context: bool, deadline: float) -> PageTicket:
        if (tokens is None) == (pages is None):
            raise ValueError("name either tokens or pages of the lease")
        count = self.layout.pages_for(tokens) if tokens is not None else pages
        assert count is not None
        if not 0 <= count <= self.pages:
            raise ValueError(f"{owner} wants {count} pages, the pool has {self.pages}")
        if context and self.ledger.slots == 0:
            raise ValueError("the pool has no context slots; open it with contexts= and a layout with context_bytes")
        return PageTicket(owner, count, int(context), deadline)

    def _grant(self, ticket: PageTicket) -> KvLease:
        number = next(_numbers)
        pages, slot = self.ledger.hold(number, ticket.pages, ticket.slots)
        lease = self._leases[number] = KvLease(self, number, ticket.owner, pages, slot, ticket.deadline)
        return lease

    def _serve(self) -> None:
        while self._queue and not self._closed and not self.revoker.holds_back():
            ticket = self._queue[0]
            if not self.ledger.can_hold(ticket.pages, ticket.slots):
                return
            self._queue.popleft()
            ticket.granted = self._grant(ticket)
            ticket.event.set()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the pool is closed")

    def _close(self) -> None:
        self._closed = True
        for ticket in self._queue:
            ticket.event.set()
        self._queue.clear()
        self.revoker.close()

    def __repr__(self) -> str:
        return f"<KvPool of {self.pages} pages, {self.ledger.free} free>"
