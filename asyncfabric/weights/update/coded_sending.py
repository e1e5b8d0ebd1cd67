"""Coded sending: what of one version goes to receivers in coded rows, unit by unit as the pipeline brings it.

`take` runs on the event loop's thread, coding on a worker thread. What is sent is also collected for the next base.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from asyncfabric.weights.coding import Coding, encode_delta, encode_exponents
from asyncfabric.weights.update.bases import Bases, item_of
from asyncfabric.weights.update.lane import Lane
from asyncfabric.weights.update.program import Box, Unit
from asyncfabric.weights.update.rows import Bytes
from asyncfabric.weights.update.shards import Shards
from asyncfabric.weights.update.threads import in_thread

Forms = dict[Coding, tuple[Coding, "Bytes | bytes"]]
"""By the coding of a lane: what a box is sent in, which is FULL where the lane's coding does not make it shorter."""


class CodedSending:
    """One version of one trainer, for the receivers that have lanes.

    Attributes:
        lanes: by receiver.
    """

    def __init__(self, lanes: Mapping[str, Lane], bases: Bases, shards: Shards) -> None:
        """Send what the pipeline brings; `bases` has begun to collect this version."""
        self.lanes: dict[str, Lane] = dict(lanes)
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

    def _form(self, box: Box, coding: Coding, sent: Bytes) -> tuple[Coding, Bytes | bytes]:
        shorter: bytes | None = None
        if coding is Coding.EXPONENT:
            shorter = encode_exponents(sent, item_of(box))
        elif coding is Coding.DELTA and (old := self._bases.old(box)) is not None and old.size == sent.size:
            shorter = encode_delta(old, sent, item_of(box))
        return (Coding.FULL, sent) if shorter is None else (coding, shorter)

    def _sent_bytes(self, box: Box, staged: Bytes | None, at: int) -> Bytes:
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
