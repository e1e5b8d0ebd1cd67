"""EarlyNotes: notes that have come before the bytes of their transfers, and the counters that they wait for.

Pure but for the counters; one thread at a time. Each sender has a few slots, each with a counter that nobody else
counts on. A note names its slot and the count that the counter has when all bytes are visible (INV-1), and is ready
then, not before. Messages may come in any order. A withdrawal drops the note of a transfer that failed and closes the
counter, whose count nobody knows any more: what still arrives for it is stale, and its number is never given again.
Notes of transfers before that one are ready with it: they had ended at the sender before it sent the withdrawal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from asyncfabric.integrations.nixl.notes import Part, number_of
from asyncfabric.integrations.nixl.slot_messages import SlotEntry

logger: logging.Logger = logging.getLogger(__name__)

SLOTS_OF_A_SENDER = 16
MOST_SLOTS = 4096
"""Of all senders; who asks beyond them gets none, and sends its notes when the bytes have arrived."""
MOST_WAITING = 64
"""Notes that wait for one counter. Of an agent that keeps to the rules hardly more than one does."""


class Counter(Protocol):
    """Counts the arrivals of one imm."""

    @property
    def imm(self) -> int:
        """The imm that is counted."""

    @property
    def counted(self) -> int:
        """Arrivals that are known so far; their bytes are visible."""

    def close(self) -> None:
        """Count nothing more: what arrives is stale."""


class _Slot:
    """One slot that was granted."""

    __slots__ = ("counter", "notes", "peer")

    def __init__(self, peer: int, counter: Counter) -> None:
        self.peer = peer
        self.counter = counter
        self.notes: list[Part] = []


class EarlyNotes:
    """The slots of all senders, and the notes that wait.

    Attributes:
        peers: the senders that have slots, with the numbers of these.
        dropped: notes that will never be ready.
    """

    def __init__(self, open_counter: Callable[[], Counter | None], most_slots: int = MOST_SLOTS) -> None:
        """Hold nothing; `open_counter` returns None when no counter can be had."""
        self._open_counter = open_counter
        self._most_slots = most_slots
        self._next = 1
        self._slots: dict[int, _Slot] = {}
        self._waiting: set[int] = set()  # numbers of slots with notes
        self._withdrawn: dict[int, tuple[int, int]] = {}  # peer, and the count up to which notes are ready; the latest
        self._ended: list[tuple[int, Part]] = []  # ready without a look at a counter
        self.peers: dict[int, set[int]] = {}
        self.dropped: int = 0

    @property
    def waiting(self) -> bool:
        """Whether a note waits, or is ready and not taken out."""
        return bool(self._waiting or self._ended)

    def grant(self, peer: int) -> list[SlotEntry]:
        """Open the slots of a sender; none for one that has some, and none beyond the bound."""
        if peer in self.peers or len(self._slots) + SLOTS_OF_A_SENDER > self._most_slots:
            return []
        self.peers[peer] = set()
        opened = (self._open(peer) for _ in range(SLOTS_OF_A_SENDER))
        return [name for name in opened if name is not None]

    def take_in(self, peer: int, note: Part) -> bool:
        """Keep a note until its count is reached; False for one whose slot the sender has not, or has withdrawn."""
        slot = self._slots.get(note.slot)
        if slot is None:
            sender, ended = self._withdrawn.get(note.slot, (0, 0))
            if sender == peer and note.arrivals <= ended:
                self._ended.append((peer, note))
            return sender == peer
        if slot.peer != peer or len(slot.notes) >= MOST_WAITING:
            return False
        slot.notes.append(note)
        self._waiting.add(note.slot)
        return True

    def withdraw(self, peer: int, number: int, ended: int) -> SlotEntry | None:
        """Close a slot and drop its notes beyond the count `ended`; return its replacement, if there is one."""
        slot = self._slots.get(number)
        if slot is None or slot.peer != peer:
            return None
        self._ended.extend((peer, note) for note in slot.notes if note.arrivals <= ended)
        slot.notes = [note for note in slot.notes if note.arrivals > ended]
        self._close(number)
        self._withdrawn[number] = (peer, ended)
        if len(self._withdrawn) > self._most_slots:
            del self._withdrawn[next(iter(self._withdrawn))]
        return self._open(peer)

    def ready(self) -> list[tuple[int, Part]]:
        """Take out the notes whose counts are reached, with their peers, in the order of their numbers."""
        if not self._waiting and not self._ended:
            return []
        found, self._ended = self._ended, []
        for number in tuple(self._waiting):
            slot = self._slots[number]
            value, notes = slot.counter.counted, slot.notes
            if len(notes) > 1:
                found += [(slot.peer, note) for note in notes if note.arrivals <= value]
                slot.notes = notes = [note for note in notes if note.arrivals > value]
            elif notes[0].arrivals <= value:
                found.append((slot.peer, notes.pop()))
            if not notes:
                self._waiting.discard(number)
        if len(found) > 1:
            found.sort(key=number_of)
        return found

    def forget(self, peer: int) -> None:
        """Close the slots of a sender that is lost; its notes that are not ready never will be."""
        for number in tuple(self.peers.get(peer, ())):
            self._close(number)
        self.peers.pop(peer, None)

    def _open(self, peer: int) -> SlotEntry | None:
        counter = self._open_counter()
        if counter is None:
            return None
        number, self._next = self._next, self._next + 1
        self._slots[number] = _Slot(peer, counter)
        self.peers[peer].add(number)
        return SlotEntry(number, counter.imm)

    def _close(self, number: int) -> None:
        slot = self._slots.pop(number)
        self._waiting.discard(number)
        self.peers[slot.peer].discard(number)
        self.dropped += len(slot.notes)
        for note in slot.notes:
            logger.debug("a note of %r is dropped: its transfer failed, was cancelled or lost", note.name)
        slot.counter.close()
