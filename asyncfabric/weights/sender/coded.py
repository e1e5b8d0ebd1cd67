"""Coded rows of one version, unit by unit as the pipeline brings them; and the bases that deltas are made against.

`take` runs on the event loop's thread, coding on a worker thread. A version that is being sent collects boxes beside;
it becomes the base when it is decided, and is forgotten when it is not. Until a delta is known to pay, only a sample
of boxes is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from asyncfabric.weights.coding.choice import SAMPLE_BOXES, SAMPLE_BYTES, Coding
from asyncfabric.weights.coding.codings import encode_delta, encode_exponents
from asyncfabric.weights.coding.lane import CodingLane
from asyncfabric.weights.memory.rows import Bytes
from asyncfabric.weights.plan.formats import STORED_AS
from asyncfabric.weights.sender.program import ShardBox, Unit
from asyncfabric.weights.sender.shards import Shards
from asyncfabric.weights.threads import in_thread

BoxKey = tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class Bases:
    """The base, and the version that may become it.

    Attributes:
        version: that the base is, 0 for none or when only a sample of it is kept.
    """

    def __init__(self) -> None:
        """Keep nothing yet."""
        self.version: int = 0
        self._held: dict[BoxKey, Bytes] = {}
        self._next: dict[BoxKey, Bytes] = {}
        self._wanted: frozenset[BoxKey] | None = frozenset()

    def begin(self, wanted: Iterable[ShardBox] | None) -> None:
        """Begin to collect these boxes of a version, or all of them."""
        self._next = {}
        self._wanted = None if wanted is None else frozenset(key_of(box) for box in wanted)

    def old(self, box: ShardBox) -> Bytes | None:
        """Return the bytes of a box in the base, None when there are none."""
        return self._held.get(key_of(box))

    @property
    def collects(self) -> bool:
        """Whether anything of this version is collected."""
        return self._wanted is None or bool(self._wanted)

    def wants(self, box: ShardBox) -> bool:
        """Whether a box is to be collected."""
        return self._wanted is None or (bool(self._wanted) and key_of(box) in self._wanted)

    def take(self, box: ShardBox, sent: Bytes) -> None:
        """Collect the bytes of a box, if it is wanted; they are copied."""
        if self.wants(box):
            key = key_of(box)
            held = self._held.get(key)
            self._next[key] = held if held is not None and np.array_equal(held, sent) else sent.copy()

    def end(self, version: int) -> None:
        """What was collected is this version, which is decided; 0 means that it was not, and the base stays."""
        if version:
            self.version = version if self._wanted is None else 0
            self._held = self._next
        self._next = {}

    def pair(self, boxes: Iterable[ShardBox]) -> tuple[Bytes, Bytes | None] | None:
        """Return (a sample of what is being sent, the same of the base or None without); None without a sample."""
        new, old = [], []
        for box in boxes:
            key = key_of(box)
            part = slice(0, SAMPLE_BYTES // SAMPLE_BOXES)
            if key in self._next:
                new.append(self._next[key][part])
                if key in self._held:
                    old.append(self._held[key][part])
        if not new:
            return None
        return np.concatenate(new), np.concatenate(old) if len(old) == len(new) else None


def sample_of(boxes: list[ShardBox]) -> tuple[list[ShardBox], int]:
    """Return a few boxes from all over the weights, and the bytes of their elements, which most of the weights have."""
    by_item: dict[int, list[ShardBox]] = {}
    for box in boxes:
        by_item.setdefault(item_of(box), []).append(box)
    if not by_item:
        return [], 1
    item, most = max(by_item.items(), key=lambda each: sum(box.weight_bytes for box in each[1]))
    return most[:: -(-len(most) // SAMPLE_BOXES)], item


def item_of(box: ShardBox) -> int:
    """Return the bytes of an element as it is sent."""
    return STORED_AS[box.kind.to].itemsize


def key_of(box: ShardBox) -> BoxKey:
    """Return what a box is in every version, whoever takes part."""
    order = tuple(box.rows[0].shape.order)
    return box.parameter_number, box.kind_number, tuple(box.start.tolist()), box.size, order


Forms = dict[Coding, tuple[Coding, "Bytes | bytes"]]
"""By the coding of a lane: what a box is sent in, which is FULL where the lane's coding does not make it shorter."""


class CodedSending:
    """One version of one trainer, for the receivers that have lanes.

    Attributes:
        lanes: by receiver.
    """

    def __init__(self, lanes: Mapping[str, CodingLane], bases: Bases, shards: Shards) -> None:
        """Send what the pipeline brings; `bases` has begun to collect this version."""
        self.lanes: dict[str, CodingLane] = dict(lanes)
        self._bases = bases
        self._shards = shards

    async def take(self, unit: Unit, staged: Bytes | None, at: int, sums: list[int]) -> None:
        """Code and send the rows of a unit that have lanes; returns when its memory is not read any more.

        Args:
            unit: converted and hashed.
            staged: the staging memory, None when nothing is staged.
            at: where in it the unit begins.
            sums: checksum of each box.

        Cancellation: waits for the thread that codes.
        """
        if not self.lanes and not any(self._bases.wants(box) for box in unit.boxes):
            return
        forms = await in_thread(self._coded, unit, staged, at)
        for box, checksum, form in zip(unit.boxes, sums, forms, strict=True):
            for row in box.rows:
                lane = self.lanes.get(row.receiver)
                if lane is not None:
                    await lane.put(row.row, checksum, box.weight_bytes + box.scale_bytes, *form[lane.coding])

    async def finish(self) -> None:
        """Write what is left in slots; returns when every write has ended.

        Cancellation: see `drain`.
        """
        for lane in self.lanes.values():
            await lane.flush()
        for lane in self.lanes.values():
            await lane.finish()

    async def drain(self) -> None:
        """Return when nothing that was posted is under way any more (INV-2).

        Cancellation: the caller shields.
        """
        for lane in self.lanes.values():
            await lane.drain()

    def _coded(self, unit: Unit, staged: Bytes | None, at: int) -> list[Forms]:
        """Return what is sent of each box. On a worker thread."""
        found: list[Forms] = []
        for box in unit.boxes:
            wanted = {lane.coding for row in box.rows if (lane := self.lanes.get(row.receiver)) is not None}
            if wanted or self._bases.wants(box):
                sent = self._sent_bytes(box, staged, at)
                self._bases.take(box, sent)
                found.append({coding: self._form(box, coding, sent) for coding in wanted})
            else:
                found.append({})
            at += box.staged_bytes
        return found

    def _form(self, box: ShardBox, coding: Coding, sent: Bytes) -> tuple[Coding, Bytes | bytes]:
        shorter: bytes | None = None
        if coding is Coding.EXPONENT:
            shorter = encode_exponents(sent, item_of(box))
        elif coding is Coding.DELTA and (old := self._bases.old(box)) is not None and old.size == sent.size:
            shorter = encode_delta(old, sent, item_of(box))
        return (Coding.FULL, sent) if shorter is None else (coding, shorter)

    def _sent_bytes(self, box: ShardBox, staged: Bytes | None, at: int) -> Bytes:
        """Return the bytes of a box as they are hashed: weights in the receiver's order, then scales."""
        if box.direct is not None:
            region, base = box.source(self._shards)
            weights = box.direct.gathered(np.frombuffer(region.memory, np.uint8), base)
        else:
            assert staged is not None
            weights = staged[at : at + box.weight_bytes]
        if not box.scale_bytes:
            return weights
        assert staged is not None
        at += box.scales_staged_at
        return np.concatenate([weights, staged[at : at + box.scale_bytes]])
