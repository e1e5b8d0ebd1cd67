"""Slots: where coded rows arrive at a receiver, and how they get from there into the copy that is being filled.

Runs on the event loop's thread, decoding on worker threads. Decoded rows are reported to the intake as if they had been
written, so checksums, forwarding and the decision are the same for both. Keys are of one version (WC-4).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import numpy as np

from asyncfabric import BrokenError, Fabric, ImmCounter, Region, RemoteProtocolError
from asyncfabric._groups import unwrapped
from asyncfabric._queue import Queue
from asyncfabric.weights.coding.choice import KNOWN, Coding
from asyncfabric.weights.coding.codings import apply_delta, decode_exponents
from asyncfabric.weights.memory.rows import PLACE_ALIGN, Bytes
from asyncfabric.weights.messages import Coded, CodedSlots, Taken, Written
from asyncfabric.weights.outbox import Outbox
from asyncfabric.weights.receiver.copies import Copy
from asyncfabric.weights.receiver.intake import Intake
from asyncfabric.weights.threads import in_thread

SLOTS = 2
"""For each sender: one is filled while the other is read."""

CODING_BYTES = 64 << 20


@dataclass(slots=True)
class _Slots:
    """The slots of one sender."""

    begin: int
    counters: list[ImmCounter]
    filled: list[int]
    open: list[bool]
    queue: Queue[Coded]


class SlotMemory:
    """The region, registered once, and whether senders may use it.

    Attributes:
        trusted: False after a coded version had wrong bytes: the next one comes plain.
    """

    def __init__(self, region: Region, codings: frozenset[Coding]) -> None:
        """Read these codings."""
        self.region: Region = region
        self.memory: Bytes = np.frombuffer(region.memory, np.uint8)
        self.codings: frozenset[Coding] = codings
        self.trusted: bool = True

    @asynccontextmanager
    async def arrivals(
        self, fabric: Fabric, version: int, base: Copy | None, intake: Intake, outbox: Outbox
    ) -> AsyncIterator[Arrivals]:
        """Open the slots for one version; on leaving its keys are dead and its counters closed.

        Args:
            fabric: of the receiver.
            version: on its way.
            base: the copy that serves, which is another one than is filled; None without.
            intake: checks the copy that is filled.
            outbox: reports slots that were read.

        Cancellation: shielded while keys are taken back.
        """
        await self.region.revoke()
        arrivals = Arrivals(self, fabric, version, base, intake, outbox)
        try:
            with unwrapped():
                yield arrivals
        except BrokenError:
            self.trusted = self.trusted and not arrivals.used
            raise
        finally:
            arrivals.close()
            with anyio.CancelScope(shield=True):
                await self.region.revoke()


class Arrivals:
    """Coded rows of one version.

    Attributes:
        used: whether any came.
    """

    def __init__(
        self, slot_memory: SlotMemory, fabric: Fabric, version: int, base: Copy | None, intake: Intake, outbox: Outbox
    ) -> None:
        """Open the counters; see `SlotMemory.arrivals`."""
        self.used: bool = False
        self._slot_memory = slot_memory
        self._version = version
        self._base = base
        self._into = intake.copy
        self._intake = intake
        self._places = intake.places
        self._outbox = outbox
        senders = list(intake.names)
        self._slots: dict[str, _Slots] = {}
        self._codings = slot_memory.codings if slot_memory.trusted else frozenset()
        whole = slot_memory.region.length // max(1, len(senders) * SLOTS)
        self._slot_bytes = whole // PLACE_ALIGN * PLACE_ALIGN
        if not self._codings or not self._slot_bytes:
            return
        try:
            for number, sender in enumerate(senders):
                slots = _Slots(number * SLOTS * self._slot_bytes, [], [0] * SLOTS, [True] * SLOTS, Queue())
                self._slots[sender] = slots
                for _ in range(SLOTS):
                    slots.counters.append(fabric.counter())
        except BaseException:
            self.close()
            raise

    def offer(self, sender: str) -> CodedSlots | None:
        """Return what a sender gets, None for one that has no slots."""
        slots = self._slots.get(sender)
        if slots is None:
            return None
        part = self._slot_memory.region[slots.begin : slots.begin + SLOTS * self._slot_bytes]
        return CodedSlots(
            sorted(one.value for one in self._codings),
            self._base.version if self._base is not None else 0,
            part.key("write").to_bytes(),
            self._slot_bytes,
            [counter.imm for counter in slots.counters],
            len(self._slots),
        )

    def take(self, sender: str, message: Coded) -> None:
        """Take the report that a slot was filled.

        Raises RemoteProtocolError for a slot that is not free or not this sender's, and for a message that is damaged.
        """
        slots = self._slots.get(sender)
        if slots is None or message.slot >= SLOTS or not slots.open[message.slot]:
            raise RemoteProtocolError(
                f"{sender} filled slot {message.slot} of version {message.version}, not its to fill"
            )
        if not len(message.rows) == len(message.sums) == len(message.lengths) == 8 * len(message.codings):
            raise RemoteProtocolError(f"{sender} states version {message.version} in columns of different lengths")
        slots.open[message.slot] = False
        self.used = True
        slots.queue.put_nowait(message)

    def finish(self) -> None:
        """Note that every row is here and right: `run` ends."""
        self._slot_memory.trusted = True
        for slots in self._slots.values():
            slots.queue.close()

    def close(self) -> None:
        """Close the counters; what arrives later is stale."""
        for slots in self._slots.values():
            for counter in slots.counters:
                counter.close()

    async def run(self) -> None:
        """Decode what arrives until `finish`.

        Raises:
            BrokenError: a coded row is damaged; the text names the sender.
            RemoteProtocolError: a sender filled slots with what is not its.

        Cancellation: waits for the threads that decode, which write into the copy; then it goes on.
        """
        with unwrapped():
            async with anyio.create_task_group() as tasks:
                for sender, slots in self._slots.items():
                    tasks.start_soon(self._serve, sender, slots)

    # ---- inside

    async def _serve(self, sender: str, slots: _Slots) -> None:
        async for message in slots.queue:
            rows, lengths = np.frombuffer(message.rows, "<i8"), np.frombuffer(message.lengths, "<i8")
            self._intake.check(sender, message.version, rows)
            if (lengths < 0).any() or lengths.sum() > self._slot_bytes:
                raise RemoteProtocolError(f"{sender} states {lengths.sum()} coded bytes in {self._slot_bytes}")
            slot = message.slot
            slots.filled[slot] += 1
            await slots.counters[slot].wait(slots.filled[slot])
            at = slots.begin + slot * self._slot_bytes
            try:
                await in_thread(self._decode, rows.tolist(), list(message.codings), lengths.tolist(), at)
            except ValueError as error:
                raise BrokenError(
                    f"coded rows of {sender} are damaged: {error}", remedy="publish again; the next version comes plain"
                ) from error
            self._intake.take(
                sender, Written(message.version, message.rows, message.sums, message.checksum), decoded=True
            )
            slots.open[slot] = True
            self._outbox.put(sender, Taken(message.version, slot))

    def _decode(self, rows: list[int], codings: list[int], lengths: list[int], at: int) -> None:
        """Put rows into the copy. On a worker thread."""
        for row, number, length in zip(rows, codings, lengths, strict=True):
            coded = self._slot_memory.memory[at : at + length]
            self._put(row, Coding(KNOWN[number]) if number < len(KNOWN) else None, coded)
            at += length

    def _put(self, row: int, coding: Coding | None, coded: Bytes) -> None:
        shape, (weights_at, scales_at) = self._places.shape(row), self._places.places(row)
        weights, item = shape.weights.nbytes, shape.weights.item
        if coding is Coding.FULL:
            if coded.size != shape.nbytes:
                raise ValueError(f"{coded.size} bytes for row {row}, which has {shape.nbytes}")
            decoded = coded
        elif coding is Coding.DELTA and self._base is not None:
            decoded = np.empty(shape.nbytes, np.uint8)
            decoded[:weights] = shape.weights.gathered(self._base.memory, weights_at)
            if shape.scales is not None:
                decoded[weights:] = shape.scales.gathered(self._base.memory, scales_at)
            apply_delta(decoded, coded.data, item)
        elif coding is Coding.EXPONENT:
            decoded = np.empty(shape.nbytes, np.uint8)
            decode_exponents(decoded, coded.data, item)
        else:
            raise ValueError(f"row {row} is in a coding that this receiver did not ask for")
        shape.weights.scatter(self._into.memory, weights_at, decoded[:weights])
        if shape.scales is not None:
            shape.scales.scatter(self._into.memory, scales_at, decoded[weights:])


@asynccontextmanager
async def open_slots(fabric: Fabric, codings: frozenset[Coding], length_bytes: int) -> AsyncIterator[SlotMemory | None]:
    """Allocate memory for coded rows, None when no coding is read; released on leaving.

    Raises:
        ValueError: `length_bytes` is not above 0.
        DeviceError: no memory left.

    Cancellation: shielded while memory is released; then it goes on.
    """
    if not codings:
        yield None
        return
    if length_bytes <= 0:
        raise ValueError(f"coding_bytes must be above 0, got {length_bytes}")
    region = await fabric.allocate(length_bytes, access="write")
    try:
        yield SlotMemory(region, codings)
    finally:
        with anyio.CancelScope(shield=True):
            await region.release()
