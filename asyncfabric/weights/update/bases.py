"""Bases: what a trainer sent as the last committed version, box by box, to make deltas against.

Used by one thread at a time. A version that is being sent collects boxes beside; it becomes the base when it is
decided, and is forgotten when it is not. Until a delta is known to pay, only a sample of boxes is kept.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from asyncfabric.weights.coding.choice import SAMPLE_BYTES
from asyncfabric.weights.formats import STORED_AS
from asyncfabric.weights.update.program import Box
from asyncfabric.weights.update.rows import Bytes

BoxKey = tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]

SAMPLE_BOXES = 4


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

    def begin(self, wanted: Iterable[Box] | None) -> None:
        """Begin to collect these boxes of a version, or all of them."""
        self._next = {}
        self._wanted = None if wanted is None else frozenset(key_of(box) for box in wanted)

    def old(self, box: Box) -> Bytes | None:
        """Return the bytes of a box in the base, None when there are none."""
        return self._held.get(key_of(box))

    @property
    def collects(self) -> bool:
        """Whether anything of this version is collected."""
        return self._wanted is None or bool(self._wanted)

    def wants(self, box: Box) -> bool:
        """Whether a box is to be collected."""
        return self._wanted is None or (bool(self._wanted) and key_of(box) in self._wanted)

    def take(self, box: Box, sent: Bytes) -> None:
        """Collect the bytes of a box, if it is wanted; they are copied."""
        if self.wants(box):
            key = key_of(box)
            held = self._held.get(key)
            self._next[key] = held if held is not None and np.array_equal(held, sent) else sent.copy()

    def end(self, version: int) -> None:
        """What was collected is this version, which is decided; 0 says that it was not, and the base stays."""
        if version:
            self.version = version if self._wanted is None else 0
            self._held = self._next
        self._next = {}

    def pair(self, boxes: Iterable[Box]) -> tuple[Bytes, Bytes | None] | None:
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


def sample_of(boxes: list[Box]) -> tuple[list[Box], int]:
    """Return a few boxes from all over the weights, and the bytes of their elements, which most of the weights have."""
    by_item: dict[int, list[Box]] = {}
    for box in boxes:
        by_item.setdefault(item_of(box), []).append(box)
    if not by_item:
        return [], 1
    item, most = max(by_item.items(), key=lambda each: sum(box.weight_bytes for box in each[1]))
    return most[:: -(-len(most) // SAMPLE_BOXES)], item


def item_of(box: Box) -> int:
    """Return the bytes of an element as it is sent."""
    return STORED_AS[box.kind.to].itemsize


def key_of(box: Box) -> BoxKey:
    """Return what a box is in every version, whoever takes part."""
    order = tuple(box.rows[0].shape.order)
    return box.parameter_number, box.kind_number, tuple(box.start.tolist()), box.size, order
