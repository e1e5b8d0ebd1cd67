"""SenderCodings: what a trainer knows and keeps so that codings can be used: rates, the base, memory for coded rows.

Runs on the event loop's thread; samples are measured on a worker thread. One version at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import anyio

from asyncfabric import Fabric, Region
from asyncfabric.weights.channel import Send
from asyncfabric.weights.coding.choice import Coding, CodingOffer, CostRule, Costs, Rule, fastest_of
from asyncfabric.weights.coding.lane import CodingLane, CodingMemory, slot_length
from asyncfabric.weights.memory.checksums import ChecksumKind
from asyncfabric.weights.memory.rows import Bytes
from asyncfabric.weights.messages import CodedSlots, CodingReport, Taken
from asyncfabric.weights.sender.coded import Bases, CodedSending, sample_of
from asyncfabric.weights.sender.program import Program, ShardBox
from asyncfabric.weights.sender.shards import Shards
from asyncfabric.weights.threads import in_thread


class SenderCodings:
    """The codings of one trainer.

    Attributes:
        sending: what is coded of the version that is being sent, None without.
    """

    def __init__(self, fabric: Fabric, shards: Shards, name: str, codings: frozenset[Coding], rule: Rule) -> None:
        """Write these codings."""
        self.sending: CodedSending | None = None
        self._fabric = fabric
        self._shards = shards
        self._name = name
        self._codings = codings
        self._cost_rule = CostRule(rule)
        self._bases = Bases()
        self._region: Region | None = None
        self._program: Program | None = None
        self._chosen: dict[str, tuple[Coding, str]] = {}
        self._bytes: dict[str, int] = {}
        self._gone: set[str] = set()

    async def begin(
        self,
        version: int,
        program: Program,
        offered_slots: Mapping[str, CodedSlots | None],
        send: Send,
        kind: ChecksumKind,
    ) -> CodedSending | None:
        """Choose for each receiver of a version, and return what sends coded rows; None when nothing is to be done.

        Cancellation: nothing was sent.
        """
        self._program = program
        self._bytes, largest = _bytes_for(program)
        offers = {
            name: self._offer(coded_slots, self._bytes[name])
            for name, coded_slots in offered_slots.items()
            if coded_slots is not None and name in self._bytes
        }
        best = {name: self._cost_rule.choose(name, offer)[0] for name, offer in offers.items()}
        self._chosen = {name: self._cost_rule.settle(name, offer) for name, offer in offers.items()}
        slots: dict[str, int] = {}
        for name, (coding, _) in list(self._chosen.items()):
            if coding is Coding.FULL:
                continue
            coded_slots = offered_slots[name]
            assert coded_slots is not None
            if coded_slots.slot_bytes < largest[name] or not coded_slots.imms:
                need = largest[name] * max(1, len(coded_slots.imms)) * coded_slots.senders
                self._chosen[name] = (Coding.FULL, f"its coding_bytes are too few: give {need} or smaller chunk_bytes")
                continue
            slots[name] = slot_length(coded_slots, largest[name])
        self._bases.begin(self._collected(program, set(best.values())) if offers else ())
        memory = await self._memory({name: size * len(_imms(offered_slots[name])) for name, size in slots.items()})
        lanes, at = {}, 0
        for name, size in slots.items():
            coded_slots = offered_slots[name]
            assert memory is not None and coded_slots is not None
            room = CodingMemory(memory, at, size)
            lane = lanes[name] = CodingLane(self._fabric, room, coded_slots, name, version, self._chosen[name][0], send)
            lane.kind = kind
            at += size * len(coded_slots.imms)
            if name in self._gone:
                lane.lost()
        if lanes or self._bases.collects:
            self.sending = CodedSending(lanes, self._bases, self._shards)
        return self.sending

    def take(self, receiver: str, message: Taken) -> None:
        """A receiver has read a slot."""
        if self.sending is not None and receiver in self.sending.lanes:
            self.sending.lanes[receiver].take(message)

    def opened(self, receiver: str) -> None:
        """A receiver takes part in the version: it is there, again if it was gone."""
        self._gone.discard(receiver)

    def lost(self, receiver: str) -> None:
        """A receiver is gone, maybe before anything was sent to it."""
        self._gone.add(receiver)
        if self.sending is not None and receiver in self.sending.lanes:
            self.sending.lanes[receiver].lost()

    def sent(self, seconds: float) -> tuple[CodingReport, ...]:
        """Take how long the version took to write, and return what was used."""
        lanes = self.sending.lanes if self.sending is not None else {}
        found = []
        for name, (coding, why) in self._chosen.items():
            lane = lanes.get(name)
            plain = self._bytes[name]
            found.append(CodingReport(self._name, name, coding.value, plain, lane.sent_bytes if lane else plain, why))
        if seconds > 0:
            self._cost_rule.sent((name, self._chosen[name][0], self._bytes[name] / seconds) for name in self._chosen)
        return tuple(found)

    async def measure(self) -> None:
        """Code a sample of the version that was sent, if it is time to.

        Cancellation: waits for the thread that codes.
        """
        if self._program is None or not self._cost_rule.wants_sample():
            return
        boxes, item = sample_of(self._program.boxes)
        pair = self._bases.pair(boxes)
        if pair is None or (pair[1] is None and Coding.DELTA in self._codings):
            return
        self._cost_rule.measured(await in_thread(self._costs, *pair, item))

    def end(self, committed: int) -> None:
        """The version was decided (its number), or it was not (0), or nobody here knows (0)."""
        self.sending = None
        self._gone.clear()
        self._bases.end(committed)

    async def aclose(self) -> None:
        """Release the memory.

        Cancellation: shielded.
        """
        with anyio.CancelScope(shield=True):
            if self._region is not None:
                await self._region.release()
                self._region = None

    # ---- inside

    def _offer(self, coded_slots: CodedSlots, own_bytes: int) -> CodingOffer:
        assert self._program is not None
        everything = sum(box.weight_bytes + box.scale_bytes for box in self._program.boxes)
        both = frozenset(one for one in self._codings if one.value in coded_slots.codings)
        has_base = bool(coded_slots.base) and coded_slots.base == self._bases.version
        return CodingOffer(both, has_base, own_bytes / max(1, everything), max(1, coded_slots.senders))

    def _collected(self, program: Program, best: set[Coding]) -> Sequence[ShardBox] | None:
        """Return the boxes to collect: all (None) for deltas, a sample before it is measured, or none."""
        if Coding.DELTA in best:
            return None
        return sample_of(program.boxes)[0] if self._cost_rule.wants_sample(ahead=1) else ()

    def _costs(self, new: Bytes, old: Bytes | None, item: int) -> dict[Coding, Costs | None]:
        return {one: fastest_of(one, new, item, old) for one in self._codings}

    async def _memory(self, wanted: Mapping[str, int]) -> Region | None:
        """Return local memory for the slots; it is kept from version to version."""
        length = sum(wanted.values())
        if length and (self._region is None or self._region.length < length):
            await self.aclose()
            self._region = await self._fabric.allocate(length, access="local")
        return self._region


def _bytes_for(program: Program) -> tuple[dict[str, int], dict[str, int]]:
    """Return for each receiver the bytes of all rows, and of the largest one."""
    total, largest = dict.fromkeys(program.receivers, 0), dict.fromkeys(program.receivers, 0)
    for box in program.boxes:
        length = box.weight_bytes + box.scale_bytes
        for row in box.rows:
            total[row.receiver] += length
            largest[row.receiver] = max(largest[row.receiver], length)
    return total, largest


def _imms(coded_slots: CodedSlots | None) -> list[int]:
    return coded_slots.imms if coded_slots is not None else []
