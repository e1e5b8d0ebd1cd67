"""PageLedger: who holds which page and context slot, and which of them a remote writer may still reach.

Sans-io: no fabric, no clock, no waiting. Invariant KV-1: a page is handed out only when nobody can write to it any
more; KV-2: each page is free, held by exactly one lease, or quarantined, at every moment. A lease is `exposed` from the
offer that names its pages until there is proof that the writers are done; what is let go without proof is quarantined,
and only a late proof or a fence (all keys of the region are dead) frees it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncfabric.errors import BusyError, InternalError

Ints = NDArray[np.int64]

_FREE, _HELD, _QUARANTINED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class LedgerReport:
    """Where every page is. `free + held + quarantined == pages`, always."""

    pages: int
    free: int
    held: int
    quarantined: int
    slots_free: int
    holders: dict[int, int] = field(default_factory=dict)
    exposed: tuple[int, ...] = ()


@dataclass(slots=True)
class _PageEntry:
    pages: Ints
    slot: int
    exposed: bool = False


class PageLedger:
    """The books of one pool; leases are known by their number."""

    def __init__(self, pages: int, slots: int, order: Iterable[int] | None = None) -> None:
        """Open with every page free; `order` gives the order in which they are handed out first."""
        taken = np.arange(pages, dtype=np.int64) if order is None else np.array(list(order), dtype=np.int64)
        if sorted(taken.tolist()) != list(range(pages)):
            raise ValueError(f"order must name each of the {pages} pages once")
        self.pages = pages
        self.slots = slots
        self._free = taken[::-1].copy()  # a stack; its top is the end
        self._free_count = pages
        self._free_slots = list(range(slots))[::-1]
        self._state = np.full(pages, _FREE, np.uint8)
        self._held: dict[int, _PageEntry] = {}
        self._quarantined: dict[int, _PageEntry] = {}
        self._fencing: frozenset[int] | None = None

    @property
    def free(self) -> int:
        """Pages that can be handed out now."""
        return self._free_count

    @property
    def exposed(self) -> frozenset[int]:
        """Leases that remote writers may write to, by what is known."""
        return frozenset(number for number, entry in self._held.items() if entry.exposed)

    @property
    def quarantined(self) -> frozenset[int]:
        """Leases that are gone while remote writers may still write to their pages."""
        return frozenset(self._quarantined)

    @property
    def fencing(self) -> bool:
        """Whether a fence has begun and not ended: nothing may be exposed meanwhile."""
        return self._fencing is not None

    def can_hold(self, pages: int, slots: int) -> bool:
        """Return whether a lease of this size could be had now."""
        return pages <= self._free_count and slots <= len(self._free_slots)

    def hold(self, lease: int, pages: int, slots: int) -> tuple[Ints, int]:
        """Give a lease its pages and, for `slots` 1, a context slot (else -1); raises BusyError for too few."""
        if lease in self._held or lease in self._quarantined:
            raise InternalError(f"lease {lease} holds pages already")
        if not self.can_hold(pages, slots):
            free = f"{self._free_count} of {self.pages} pages and {len(self._free_slots)} of {self.slots} slots"
            raise BusyError(
                f"{pages} pages and {slots} context slots wanted, {free} are free",
                remedy="await pool.lease(), release leases, or open a larger pool",
            )
        entry = _PageEntry(self._take(pages), self._free_slots.pop() if slots else -1)
        self._held[lease] = entry
        return entry.pages, entry.slot

    def extend(self, lease: int, pages: int) -> Ints:
        """Give a lease more pages; raises BusyError when too few are free."""
        entry = self._held[lease]
        if pages > self._free_count:
            raise BusyError(
                f"{pages} more pages wanted, {self._free_count} of {self.pages} are free",
                remedy="release other leases, or lease the pages of the whole answer at once",
            )
        more = self._take(pages)
        entry.pages = np.concatenate((entry.pages, more))
        return more

    def expose(self, lease: int) -> None:
        """Note that an offer with the pages of a lease may leave; raises InternalError while a fence is under way."""
        if self._fencing is not None:
            raise InternalError("pages were exposed while the keys of their region were being revoked")
        self._held[lease].exposed = True

    def unexpose(self, lease: int) -> None:
        """Note the proof that no writer of a lease is left: everything arrived, or each source confirmed."""
        self._held[lease].exposed = False

    def release(self, lease: int) -> bool:
        """Take pages and slot back; returns whether they are free. Exposed ones are quarantined instead."""
        entry = self._held.pop(lease)
        if entry.exposed:
            self._quarantined[lease] = entry
            self._state[entry.pages] = _QUARANTINED
            return False
        self._put_back(entry)
        return True

    def confirm(self, lease: int) -> bool:
        """Note a proof that came after the release; returns whether it freed quarantined pages."""
        entry = self._quarantined.pop(lease, None)
        if entry is None:
            return False
        self._put_back(entry)
        return True

    def fence_begin(self) -> frozenset[int]:
        """Begin a fence; returns the leases whose writers it ends: exposed and quarantined ones."""
        if self._fencing is None:
            self._fencing = self.exposed | self.quarantined
        return self._fencing

    def fence_end(self) -> frozenset[int]:
        """End a fence that was successful: frees what was quarantined, unexposes and returns what was exposed."""
        fenced, self._fencing = self._fencing or frozenset(), None
        for lease in fenced & self.quarantined:
            self._put_back(self._quarantined.pop(lease))
        interrupted = fenced & self.exposed
        for lease in interrupted:
            self._held[lease].exposed = False
        return interrupted

    def report(self) -> LedgerReport:
        """Return where every page is; raises InternalError when a page is nowhere or twice (KV-2)."""
        holders = {number: len(entry.pages) for number, entry in self._held.items()}
        quarantined = sum(len(entry.pages) for entry in self._quarantined.values())
        entries = (*self._held.values(), *self._quarantined.values())
        every = np.concatenate((self._free[: self._free_count], *(entry.pages for entry in entries)))
        if len(every) != self.pages or len(np.unique(every)) != self.pages:
            raise InternalError(
                f"the ledger knows {len(every)} pages of {self.pages}, {len(np.unique(every))} distinct"
            )
        slots = sorted([*self._free_slots, *(entry.slot for entry in entries if entry.slot >= 0)])
        if slots != list(range(self.slots)):
            raise InternalError(f"the ledger knows context slots {slots}, there are {self.slots}")
        return LedgerReport(
            pages=self.pages,
            free=self._free_count,
            held=sum(holders.values()),
            quarantined=quarantined,
            slots_free=len(self._free_slots),
            holders=holders,
            exposed=tuple(sorted(self.exposed)),
        )

    def _take(self, pages: int) -> Ints:
        begin = self._free_count - pages
        taken = self._free[begin : self._free_count][::-1].copy()
        self._free_count = begin
        self._state[taken] = _HELD
        return taken

    def _put_back(self, entry: _PageEntry) -> None:
        if (self._state[entry.pages] == _FREE).any():
            raise InternalError("a page was given back twice")
        end = self._free_count + len(entry.pages)
        self._free[self._free_count : end] = entry.pages[::-1]
        self._free_count = end
        self._state[entry.pages] = _FREE
        if entry.slot >= 0:
            self._free_slots.append(entry.slot)
