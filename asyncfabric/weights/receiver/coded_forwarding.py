"""Coded forwarding: what a receiver passes on in coded rows, to receivers that read them, where it was seen to pay.

Runs on the event loop's thread, coding on worker threads. A receiver with a shadow holds both versions, so it codes by
itself, however the rows came to it: no trainer has to know. The checksum that the trainer gave travels along.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

import anyio
import numpy as np

from asyncfabric import Fabric, Region
from asyncfabric.weights.coding.choice import (
    SAMPLE_BOXES,
    SAMPLE_BYTES,
    Coding,
    CodingOffer,
    CostRule,
    Costs,
    Rule,
    fastest_of,
)
from asyncfabric.weights.coding.codings import encode_delta, encode_exponents
from asyncfabric.weights.coding.lane import CodingLane, CodingMemory, slot_length
from asyncfabric.weights.memory.checksums import ChecksumKind
from asyncfabric.weights.memory.rows import Bytes
from asyncfabric.weights.messages import CodedSlots, CodingReport, Taken
from asyncfabric.weights.outbox import Outbox
from asyncfabric.weights.receiver.awaited import RowPlaces
from asyncfabric.weights.receiver.copies import Copy
from asyncfabric.weights.threads import in_thread

Form = tuple[Coding, Bytes | bytes]

Forms = dict[tuple[int, Coding], Form]
"""By row and coding: what is sent of it, which is FULL where the coding does not make it shorter."""

Passed = tuple[int, int, int, int]
"""Row here, receiver, row there, checksum."""


class ForwardCodings:
    """What one receiver knows of the wires to those that it feeds; it outlives versions.

    Attributes:
        codings: that it writes.
    """

    def __init__(self, fabric: Fabric, name: str, codings: frozenset[Coding], rule: Rule) -> None:
        """Know nothing yet."""
        self.codings: frozenset[Coding] = codings
        self.name: str = name
        self.fabric: Fabric = fabric
        self.cost_rule: CostRule = CostRule(rule)

    async def measure(self, base: Copy | None, copy: Copy, places: RowPlaces, rows: Sequence[int]) -> None:
        """Code a sample of forwarded rows of a version that is here, if it is time to; both copies are kept so long.

        Cancellation: waits for the thread that codes.
        """
        if not rows or not self.cost_rule.wants_sample() or (base is None and Coding.DELTA in self.codings):
            return
        sample, item = _sample(places, rows)
        with copy.lend():
            if base is None:
                costs = await in_thread(self._costs, None, copy, places, sample, item)
            else:
                with base.lend():
                    costs = await in_thread(self._costs, base, copy, places, sample, item)
        self.cost_rule.measured(costs)

    def _costs(
        self, base: Copy | None, copy: Copy, places: RowPlaces, rows: Sequence[int], item: int
    ) -> dict[Coding, Costs | None]:
        part = slice(0, SAMPLE_BYTES // SAMPLE_BOXES)
        new = np.concatenate([_weights(copy, places, row)[part] for row in rows])
        old = np.concatenate([_weights(base, places, row)[part] for row in rows]) if base is not None else None
        return {one: fastest_of(one, new, item, old) for one in self.codings}


@dataclass
class _Link:
    """One receiver that is fed. `bytes`, `largest`, `left`: of all rows for it, of one row, rows still to come."""

    bytes: int = 0
    largest: int = 0
    left: int = 0
    coding: Coding | None = None  # None: it reads none
    why: str = ""
    coded_slots: CodedSlots | None = None
    lane: CodingLane | None = None
    turn: anyio.Lock = field(default_factory=anyio.Lock)
    at_work: int = 0
    since: float = 0.0
    seconds: float = 0.0


class CodedForwarding:
    """What one receiver passes on of one version, in coded rows or timed."""

    def __init__(
        self, codings: ForwardCodings, version: int, base: Copy | None, copy: Copy, places: RowPlaces, outbox: Outbox
    ) -> None:
        """Code against `base`, which serves and stays, what is complete in `copy`; lanes report by `outbox`."""
        self._codings = codings
        self._version = version
        self._base = base
        self._copy = copy
        self._places = places
        self._outbox = outbox
        self._links: dict[str, _Link] = {}
        self._regions: list[Region] = []

    def want(self, name: str, row: int) -> None:
        """Note that a row will be passed on to somebody."""
        link, length = self._links.setdefault(name, _Link()), self._places.shape(row).nbytes
        link.bytes += length
        link.largest = max(link.largest, length)
        link.left += 1

    def open(self, name: str, coded_slots: CodedSlots | None) -> None:
        """Take where a receiver takes coded rows, None when it reads none, and choose."""
        link = self._links.get(name)
        if link is None or coded_slots is None:
            return
        link.coded_slots = coded_slots
        both = frozenset(one for one in self._codings.codings if one.value in coded_slots.codings)
        has_base = self._base is not None and bool(coded_slots.base) and coded_slots.base == self._base.version
        share = link.bytes / max(1, sum(each.bytes for each in self._links.values()))
        offer = CodingOffer(both, has_base, share, max(1, coded_slots.senders))
        link.coding, link.why = self._codings.cost_rule.settle(name, offer)
        if link.coding is not Coding.FULL and (coded_slots.slot_bytes < link.largest or not coded_slots.imms):
            need = link.largest * max(1, len(coded_slots.imms)) * coded_slots.senders
            link.coding, link.why = Coding.FULL, f"its coding_bytes are too few: give {need} or smaller chunk_bytes"

    def codes(self, name: str) -> bool:
        """Whether rows for somebody go in a coding."""
        link = self._links.get(name)
        return link is not None and link.coding not in (None, Coding.FULL)

    def take(self, sender: str, message: Taken) -> None:
        """A receiver has read a slot."""
        link = self._links.get(sender)
        if link is not None and link.lane is not None:
            link.lane.take(message)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count the time in which anything is under way to somebody: waiting for the rows to come here does not."""
        link = self._links[name]
        link.since = monotonic() if not link.at_work else link.since
        link.at_work += 1
        try:
            yield
        finally:
            link.at_work -= 1
            link.seconds += monotonic() - link.since if not link.at_work else 0.0

    async def pass_on(self, name: str, wanted: Sequence[Passed], kind: ChecksumKind, forms: Forms) -> None:
        """Code rows and send them; the last ones are written when this returns. `forms` are made once for all.

        Cancellation: waits for the thread that codes; see `aclose`.
        """
        link = self._links[name]
        assert link.coding is not None
        async with link.turn:
            with self.timed(name):
                lane = link.lane or await self._open_lane(name, link)
                if lane.kind != kind:
                    await lane.flush()
                    lane.kind = kind
                for row, _, there, checksum in wanted:
                    key = (row, link.coding)
                    if key not in forms:
                        forms[key] = await in_thread(self._form, row, link.coding)
                    await lane.put(there, checksum, self._places.shape(row).nbytes, *forms[key])
                link.left -= len(wanted)
                if not link.left:
                    await lane.flush()
                    await lane.finish()

    def end(self) -> list[CodingReport]:
        """Take how long all took, and return what was used; everything is written."""
        reports, rates = [], []
        for name, link in self._links.items():
            if link.coding is None:
                continue
            sent = link.lane.sent_bytes if link.lane is not None else link.bytes
            reports.append(CodingReport(self._codings.name, name, link.coding.value, link.bytes, sent, link.why))
            if link.seconds > 0:
                rates.append((name, link.coding, link.bytes / link.seconds))
        if rates:
            self._codings.cost_rule.sent(rates)
        return reports

    async def aclose(self) -> None:
        """Return when nothing that was posted is under way any more (INV-2), and the memory is released.

        Cancellation: shielded.
        """
        with anyio.CancelScope(shield=True):
            for link in self._links.values():
                if link.lane is not None:
                    await link.lane.drain()
            for region in self._regions:
                await region.release()

    # ---- inside

    async def _open_lane(self, name: str, link: _Link) -> CodingLane:
        assert link.coded_slots is not None and link.coding is not None
        size = slot_length(link.coded_slots, link.largest)
        region = await self._codings.fabric.allocate(size * len(link.coded_slots.imms), access="local")
        self._regions.append(region)
        room = CodingMemory(region, 0, size)
        link.lane = CodingLane(
            self._codings.fabric, room, link.coded_slots, name, self._version, link.coding, self._outbox.send
        )
        return link.lane

    def _form(self, row: int, coding: Coding) -> Form:
        """Return what is sent of a row. On a worker thread."""
        new, item = _bytes(self._copy, self._places, row), self._places.shape(row).weights.item
        shorter: bytes | None = None
        if coding is Coding.EXPONENT:
            shorter = encode_exponents(new, item)
        elif self._base is not None:
            shorter = encode_delta(_bytes(self._base, self._places, row), new, item)
        return (Coding.FULL, new) if shorter is None else (coding, shorter)


def _weights(copy: Copy, places: RowPlaces, row: int) -> Bytes:
    return places.shape(row).weights.gathered(copy.memory, places.places(row)[0])


def _bytes(copy: Copy, places: RowPlaces, row: int) -> Bytes:
    """Return the bytes of a row as they are hashed: weights, then scales."""
    scales, at = places.shape(row).scales, places.places(row)[1]
    weights = _weights(copy, places, row)
    return weights if scales is None else np.concatenate([weights, scales.gathered(copy.memory, at)])


def _sample(places: RowPlaces, rows: Sequence[int]) -> tuple[list[int], int]:
    """Return a few rows from all over, and the bytes of their elements, which most of the weights have."""
    by_item: dict[int, list[int]] = {}
    for row in rows:
        by_item.setdefault(places.shape(row).weights.item, []).append(row)
    item, most = max(by_item.items(), key=lambda each: sum(places.shape(row).weights.nbytes for row in each[1]))
    return most[:: -(-len(most) // SAMPLE_BOXES)], item
