"""NoteSlots: the slots that one target granted to this agent; a noted WRITE takes one and its note leaves at once.

Any thread: a free slot is taken and given back in one step. Each slot stands for a counter of the target that nobody
else counts on. One transfer has it at a time, so the count that stands when all its bytes have arrived is known before
they leave. A slot whose transfer failed or was cancelled never comes back: its count is unknown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from asyncfabric.integrations.nixl.slot_messages import SlotEntry

if TYPE_CHECKING:
    from asyncfabric import Peer


class NoteSlot:
    """One slot.

    Attributes:
        number, imm: its name at the target, and the imm that names its counter.
        count: what the counter has when all that was submitted with its imm has arrived.
        ended: the same for all that has ended well.
    """

    __slots__ = ("count", "ended", "imm", "number", "owner")

    def __init__(self, owner: NoteSlots, entry: SlotEntry) -> None:
        self.owner: NoteSlots = owner
        self.number: int = entry.number
        self.imm: int = entry.value
        self.count: int = 0
        self.ended: int = 0


class NoteSlots:
    """The slots of one target, over one connection to it.

    Attributes:
        at_once_bytes: WRITEs of host memory of up to so many bytes end within the call that submits them, as small ones
            over shared memory do, as far as the latest have shown. Their notes need no slot.
    """

    def __init__(self, peer: Peer) -> None:
        self.peer: Peer = peer
        self.at_once_bytes: int = 0
        self.granted: bool = False
        self._free: deque[NoteSlot] = deque()

    def grant(self, entries: Iterable[SlotEntry]) -> None:
        """Take slots that the target opened."""
        self.granted = True
        self._free.extend(NoteSlot(self, entry) for entry in entries)

    def learn(self, size: int, *, at_once: bool) -> None:
        """Note whether a WRITE of so many bytes had ended within its call."""
        if at_once != (size <= self.at_once_bytes):
            self.at_once_bytes = size if at_once else size - 1

    def take(self) -> NoteSlot | None:
        """Return a slot that no transfer has; None if all are taken."""
        try:
            return self._free.popleft()
        except IndexError:
            return None

    def give_back(self, slot: NoteSlot) -> None:
        """Take a slot back; everything that was submitted with its imm has ended well."""
        slot.ended = slot.count
        self._free.append(slot)

    def __len__(self) -> int:
        return len(self._free)
