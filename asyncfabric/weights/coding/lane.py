"""CodingLane: the way of coded rows from one trainer to one receiver, for one version: slots that are filled in turn.

Runs on the event loop's thread. A slot is filled here, written with one write that the slot's own counter counts, and
reported; the receiver reads it and answers Taken, and only then it is filled again. So a slot's count gives exactly
which filling has arrived, on rails without order too, and nothing waits but for a receiver that is at work.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from asyncfabric import BusyError, Fabric, FabricError, Region, RegionKey, Transfer
from asyncfabric._notice import Notice
from asyncfabric.weights.channel import COORDINATOR, Send
from asyncfabric.weights.coding.choice import KNOWN, Coding
from asyncfabric.weights.memory.checksums import ChecksumKind
from asyncfabric.weights.memory.rows import Bytes
from asyncfabric.weights.messages import MOST_ROWS, Coded, CodedSlots, Taken, Unreachable

CODING_NUMBERS = {Coding(name): number for number, name in enumerate(KNOWN)}

WORK_BYTES = 4 << 20
"""A slot is sent when it stands for so many bytes of weights, however short they got: the receiver can begin."""

SLOT_BYTES = 4 << 20
"""Slots are not made longer than this, unless a row is."""


class CodingMemory(NamedTuple):
    """Local memory of a lane: slots of `slot_bytes` each, which is not more than the receiver's, from a byte on."""

    region: Region
    begin: int
    slot_bytes: int


def slot_length(coded_slots: CodedSlots, largest: int) -> int:
    """Return how long the sender's slots are, whose largest row has so many bytes."""
    return min(coded_slots.slot_bytes, max(largest, SLOT_BYTES))


class CodingLane:
    """Coded rows on their way to one receiver.

    Attributes:
        coding: that rows are tried in.
        kind: of the checksums of rows that are put next; what is in the slot was put with the same.
        sent_bytes: of the rows so far.
    """

    def __init__(
        self,
        fabric: Fabric,
        memory: CodingMemory,
        coded_slots: CodedSlots,
        receiver: str,
        version: int,
        coding: Coding,
        send: Send,
    ) -> None:
        """Fill slots in local memory and write them where the receiver takes coded rows.

        Each filling is reported to the receiver, and once to the coordinator that the receiver cannot be written to.
        """
        self.coding: Coding = coding
        self.kind: ChecksumKind = "xxh3"
        self.sent_bytes: int = 0
        self._fabric = fabric
        self._region = memory.region
        self._memory = np.frombuffer(memory.region.memory, np.uint8)
        self._at = memory.begin
        self._slot_bytes = memory.slot_bytes
        self._version = version
        self._receiver = receiver
        self._coded_slots = coded_slots
        self._key = RegionKey.from_bytes(coded_slots.key)
        self._send = send
        self._transfers: list[Transfer | None] = [None] * len(coded_slots.imms)
        self._taken = [True] * len(coded_slots.imms)
        self._slot = self._filled = self._work = 0
        self._rows: list[tuple[int, int, int, int]] = []
        self._gone = False
        self._changed = Notice()

    def take(self, message: Taken) -> None:
        """Take the message that a slot may be filled again."""
        if message.version == self._version and 0 <= message.slot < len(self._taken):
            self._taken[message.slot] = True
            self._changed.notify()

    def lost(self) -> None:
        """The receiver is gone: what is still to come for it goes nowhere."""
        self._gone = True
        self._changed.notify()

    async def put(self, row: int, checksum: int, plain_bytes: int, coding: Coding, coded: Bytes | bytes) -> None:
        """Add a row of `plain_bytes` to the slot that is being filled; what does not fit begins the next one.

        Cancellation: the row may or may not be in the slot; the version is over then.
        """
        length = len(coded)
        full = self._filled + length > self._slot_bytes or len(self._rows) == MOST_ROWS
        if self._rows and (full or self._work + plain_bytes > WORK_BYTES):
            await self.flush()
        if not self._rows:
            await self._wait_free()
        if self._gone:
            return
        begin = self._at + self._slot * self._slot_bytes + self._filled
        self._memory[begin : begin + length] = np.frombuffer(coded, np.uint8)
        self._rows.append((row, checksum, CODING_NUMBERS[coding], length))
        self._filled += length
        self._work += plain_bytes
        self.sent_bytes += length

    async def flush(self) -> None:
        """Write and report what is in the slot, and go on with the next slot.

        Cancellation: it was posted or not; see `drain`.
        """
        begin = self._at + self._slot * self._slot_bytes
        while self._rows and not self._gone:
            try:
                transfer = self._fabric.write(
                    self._region[begin : begin + self._filled],
                    self._key,
                    self._slot * self._coded_slots.slot_bytes,
                    self._coded_slots.imms[self._slot],
                )
            except BusyError:
                await self._fabric.wait_writable()
                continue
            except FabricError as error:
                await self._give_up(error)
                break
            self._transfers[self._slot], self._taken[self._slot] = transfer, False
            rows, sums, codings, lengths = zip(*self._rows, strict=True)
            report = Coded(
                self._version,
                self._slot,
                np.array(rows, "<i8").tobytes(),
                np.array(sums, "<u8").tobytes(),
                bytes(codings),
                np.array(lengths, "<i8").tobytes(),
                self.kind,
            )
            self._slot, self._filled, self._work = (self._slot + 1) % len(self._taken), 0, 0
            self._rows = []
            await self._send(self._receiver, report)

    async def finish(self) -> None:
        """Return when every write has ended.

        Cancellation: see `drain`.
        """
        for slot in range(len(self._transfers)):
            await self._end(slot)

    async def drain(self) -> None:
        """Post nothing more; returns when nothing reads the local memory any more (INV-2).

        Cancellation: the caller shields.
        """
        self._gone = True
        for transfer in self._transfers:
            if transfer is not None:
                transfer.cancel()
        for transfer in self._transfers:
            if transfer is not None:
                try:
                    await transfer
                except FabricError:
                    pass  # it was cancelled, or the receiver is gone

    # ---- inside

    async def _wait_free(self) -> None:
        await self._end(self._slot)
        while not self._taken[self._slot] and not self._gone:
            await self._changed.wait()

    async def _end(self, slot: int) -> None:
        transfer = self._transfers[slot]
        if transfer is not None:
            try:
                await transfer
            except FabricError as error:
                await self._give_up(error)

    async def _give_up(self, error: FabricError) -> None:
        if not self._gone:
            self.lost()
            await self._send(COORDINATOR, Unreachable(self._version, self._receiver, str(error)[:2000]))
