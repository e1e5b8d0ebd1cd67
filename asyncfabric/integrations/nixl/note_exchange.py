"""NoteExchange: the notes of one agent, both ways: sending them, late or early, and taking in what has come.

Any thread. A late note is sent when the bytes of its transfer have arrived; an early one leaves with a WRITE. Without a
free slot, for READs, long notes and within the agent itself notes are late. One thread at a time takes in, so that no
note is looked for between its message and its counter. What answers messages goes through an outbox, which never
blocks: handles withdraw their notes also when they are dropped, in the middle of anything. A sender that is lost loses
its slots; what it had sent before is looked at first.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from itertools import count
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING

from asyncfabric.errors import BusyError, ClosedError, FabricError, PeerError
from asyncfabric.integrations.nixl import slot_messages
from asyncfabric.integrations.nixl.early_notes import EarlyNotes
from asyncfabric.integrations.nixl.errors import translated
from asyncfabric.integrations.nixl.note_slots import NoteSlot, NoteSlots
from asyncfabric.integrations.nixl.notes import EARLY_BYTES, NoteQueue, Part, early_message, messages_of, read_message
from asyncfabric.integrations.nixl.slot_messages import Purpose, SlotEntry, SlotMessage

if TYPE_CHECKING:
    from asyncfabric import Peer, blocking
    from asyncfabric.integrations.nixl.remotes import RemoteAgent

logger: logging.Logger = logging.getLogger(__name__)

LOST_EVERY_S = 0.25
"""How often senders with slots are looked at; a look at the peers costs more than one at messages and counters."""


def went_well(transfer: blocking.Transfer) -> bool:
    """Return whether a transfer has ended without an error."""
    completion = transfer.completion
    return completion is not None and not completion.code


class NoteExchange:
    """Sends and takes in the notes of one agent. An early note names a slot of the target's, and a count.

    sender                                      target
    ask (with its first noted WRITE)   ------>  opens SLOTS_OF_A_SENDER counters for this sender
                                       <------  grant (slot number, imm) ...
    takes a free slot, submits the writes
    with its imm, and the note with    ------>  keeps the note until the counter of the slot has that count,
    (slot number, count)               ------>  then it goes to the program
    all ended well: the slot is free
    failed or cancelled: withdraw      ------>  drops the note, closes the counter, grants another slot
    """

    def __init__(self, title: bytes, fabric: blocking.Fabric, wait_for_room: Callable[[str], None]) -> None:
        self.queue: NoteQueue = NoteQueue()
        self.early: EarlyNotes = EarlyNotes(self._open_counter)
        self.refused: int = 0  # messages that no agent has made, or for slots that their sender has not
        self._title, self._name = title, title.decode()
        self._fabric = fabric
        self._dispatcher = fabric._dispatcher
        self._wait_for_room = wait_for_room
        self._messages = fabric.messages()
        self._numbers = count()
        self._collecting = Lock()
        self._look_at_senders = 0.0  # when to look which are lost
        self._outbox: deque[tuple[Peer, bytes]] = deque()
        self._lock = Lock()  # guards the slots
        self._slots: dict[int, NoteSlots] = {}  # granted to this agent, by the number of the target's peer

    def send(self, remote: RemoteAgent, note: bytes) -> None:
        """Submit a note that is for its reader at once.

        Raises:
            nixlRemoteDisconnectError: the agent cannot be reached.
            nixlBackendError: too many transfers are in flight, and for the drain deadline none has ended.
        """
        for message in messages_of(self._title, next(self._numbers), note):
            self._submit(remote, message, note)
        self._dispatcher.assist()  # so that they leave now, whatever the caller does next

    def slots_for(self, remote: RemoteAgent, note: bytes) -> NoteSlots | None:
        """Return the slots of a target by which this note may leave early; None if it may not."""
        peer = remote.connected
        if peer is None or len(note) > EARLY_BYTES or remote.name == self._name:
            return None
        slots = remote.slots
        if slots is None or slots.peer is not peer:
            remote.slots = slots = NoteSlots(peer)
            with self._lock:
                self._slots = {number: one for number, one in self._slots.items() if not one.peer.lost}
                self._slots[peer.id] = slots
            self._outbox.append((peer, slot_messages.pack(Purpose.ASK, [])))  # leaves when the program next looks
        elif not slots.granted:
            self.collect()  # the program may take no notes itself
        return slots

    def send_early(self, remote: RemoteAgent, slot: NoteSlot, note: bytes) -> bool:
        """Submit a note that waits for the count of its slot; False if it cannot leave now, and has to be late.

        It leaves with the bytes, by the next look at any transfer.
        """
        message = early_message(self._title, next(self._numbers), note, slot.number, slot.count)
        try:
            self._fabric._post(remote.notes, slot.owner.peer, message)
        except FabricError as error:
            if isinstance(error, PeerError):
                remote.disconnected()
            return False
        return True

    def end(self, slot: NoteSlot, well: bool) -> None:
        """Take a slot back; of a transfer that did not end well its note is withdrawn, by the next flush()."""
        if well:
            slot.owner.give_back(slot)
        else:
            entry = SlotEntry(slot.number, slot.ended)
            self._outbox.append((slot.owner.peer, slot_messages.pack(Purpose.WITHDRAW, [entry])))

    def collect(self) -> bool:
        """Move what has come, and what is ready by now, into the queue; return whether anything was."""
        self._dispatcher.drain()  # those who only send and take notes leave the completions to this
        with self._collecting:
            parts = self._look()
            if parts:
                self.queue.take_in(parts)
        if self._outbox:
            self.flush()
        return bool(parts)

    def take(self, into: dict[str, list[bytes]]) -> dict[str, list[bytes]]:
        """Move the notes that have come, and are ready by now, into lists by the name of their sender."""
        with self._collecting:
            parts = self._look()
            if parts or self.queue.waiting:
                self.queue.hand_over(parts, into)
        if self._outbox:
            self.flush()
        return into

    def flush(self) -> None:
        """Submit what the outbox holds, as far as there is room."""
        while True:
            try:
                peer, message = self._outbox.popleft()
            except IndexError:
                return
            try:
                self._fabric.send(peer, message)
            except BusyError:
                self._outbox.appendleft((peer, message))
                return
            except FabricError as error:
                logger.debug("a message about note slots does not leave: %s", error)

    def _look(self) -> list[tuple[int, Part]]:
        """Return the notes, and parts of notes, that are for the program now; one thread at a time."""
        early = self.early
        lost = self._lost() if early.peers else ()
        received = self._messages._take()
        parts = self._sorted_out(received) if received else []
        parts += early.ready()
        for peer in lost:
            early.forget(peer)
        return parts

    def _sorted_out(self, received: list[tuple[int, bytes]]) -> list[tuple[int, Part]]:
        parts: list[tuple[int, Part]] = []
        for peer, payload in received:
            part = read_message(payload)
            if part is None:
                about = slot_messages.read(payload)
                if about is None:
                    self.refused += 1
                else:
                    self._answer(peer, about)
            elif not part.slot:
                parts.append((peer, part))
            elif not self.early.take_in(peer, part):
                self.refused += 1
        return parts

    def _answer(self, peer: int, about: SlotMessage) -> None:
        if about.purpose == Purpose.GRANT:
            with self._lock:
                slots = self._slots.get(peer)
            if slots is not None:
                slots.grant(about.slots)
            return
        if about.purpose == Purpose.ASK:
            opened = self.early.grant(peer)
        else:
            replaced = [self.early.withdraw(peer, number, ended) for number, ended in about.slots]
            opened = [entry for entry in replaced if entry is not None]
        if opened:
            with self._dispatcher.lock:
                named = self._fabric._peers.by_id(peer)
            self._outbox.append((named, slot_messages.pack(Purpose.GRANT, opened)))

    def _lost(self) -> list[int]:
        """Return the senders that are lost, if it is time to look; all that they sent is here by now."""
        now = monotonic()
        if now < self._look_at_senders:
            return []
        self._look_at_senders = now + LOST_EVERY_S
        try:
            rows = self._fabric.statistics().peers
        except ClosedError:
            return []
        living = {row.id for row in rows if row.state not in ("lost", "disconnected")}
        return [peer for peer in self.early.peers if peer not in living]

    def _open_counter(self) -> blocking.ImmCounter | None:
        try:
            return self._fabric.counter()
        except FabricError as error:
            logger.debug("no counter for early notes: %s", error)
            return None

    def _submit(self, remote: RemoteAgent, message: bytes, note: bytes) -> None:
        again = False
        while True:
            try:
                return self._fabric._post(remote.notes, remote.peer(), message)
            except BusyError:
                self._wait_for_room(_note_text(remote, note))
            except PeerError as error:
                remote.disconnected()
                if again:
                    raise translated(error, _note_text(remote, note)) from error
                again = True  # the connection may have been lost and the agent be there
            except FabricError as error:
                raise translated(error, _note_text(remote, note)) from error


def _note_text(remote: RemoteAgent, note: bytes) -> str:
    return f"a note of {len(note)} bytes to agent {remote.name!r}"
