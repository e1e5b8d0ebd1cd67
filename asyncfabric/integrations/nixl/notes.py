"""Notes: how they travel in messages of the fabric, and the bounded queue of those that nobody has taken yet.

Any thread. A note longer than a message travels in parts. The parts carry the number of the note at its sender, by
which notes that arrive together are put in order.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from threading import Lock
from typing import NamedTuple

from asyncfabric.integrations.nixl.errors import nixlInvalidParamError
from asyncfabric.integrations.parts import UnfinishedMessages

logger: logging.Logger = logging.getLogger(__name__)

MESSAGE_BYTES = 8192
MOST_PARTS = 1024
"""Of one note: 8 MiB less the heads."""
KEPT_NOTES = 65_536
KEPT_BYTES = 64 << 20
"""Bounds of the notes of one agent that nobody takes; beyond them the oldest are dropped and counted."""
UNFINISHED_NOTES = 256
"""Notes of which parts are missing; beyond, or beyond KEPT_BYTES, the oldest is dropped and counted."""

_HEAD = struct.Struct(">2sBBHHQQQ")  # magic, version, name bytes, part, parts, number, slot, count
_MAGIC, _VERSION = b"AN", 2
_HEAD_BYTES, _pack, _unpack, _part = _HEAD.size, _HEAD.pack, _HEAD.unpack_from, tuple.__new__
EARLY_BYTES = MESSAGE_BYTES - _HEAD.size - 255
"""Longest note that leaves before the bytes of its transfer have arrived: one message."""


class Part(NamedTuple):
    """One message: a note, or a part of it.

    Attributes:
        number: of the note, which grows with each that its sender sends.
        slot, arrivals: the note is for its reader once the counter of this slot has so many; slot 0 is at once.
    """

    name: str
    part: int
    parts: int
    number: int
    slot: int
    arrivals: int
    payload: bytes


def note_bytes(note: object) -> bytes:
    """Return a note as bytes; text is encoded.

    Raises:
        TypeError: neither bytes nor text.
    """
    if note.__class__ is bytes:
        return note
    if isinstance(note, str):
        return note.encode()
    if isinstance(note, (bytes, bytearray, memoryview)):
        return bytes(note)
    raise TypeError(f"a note is bytes, got {type(note).__name__} {note!r}")


def early_message(name: bytes, number: int, note: bytes, slot: int, count: int) -> bytes:
    """Return the message that carries a note of at most EARLY_BYTES for a slot."""
    return _pack(_MAGIC, _VERSION, len(name), 0, 1, number, slot, count) + name + note


def messages_of(name: bytes, number: int, note: bytes) -> list[bytes]:
    """Return the messages that carry a note, one unless it is long.

    Raises:
        nixlInvalidParamError: it is too long.
    """
    room = MESSAGE_BYTES - _HEAD.size - len(name)
    if len(note) <= room:
        return [_pack(_MAGIC, _VERSION, len(name), 0, 1, number, 0, 0) + name + note]
    parts = -(-len(note) // room)
    if parts > MOST_PARTS:
        raise nixlInvalidParamError(f"a note of {len(note)} bytes; at most {room * MOST_PARTS} go")
    return [
        _pack(_MAGIC, _VERSION, len(name), part, parts, number, 0, 0) + name + note[part * room : (part + 1) * room]
        for part in range(parts)
    ]


def read_message(payload: bytes) -> Part | None:
    """Return what a message carries, None for one that no agent has made."""
    if len(payload) < _HEAD_BYTES:
        return None
    magic, version, size, part, parts, number, slot, count = _unpack(payload)
    begin = _HEAD_BYTES + size
    if magic != _MAGIC or version != _VERSION or len(payload) < begin or not part < parts <= MOST_PARTS:
        return None
    try:
        name = payload[_HEAD_BYTES:begin].decode()
    except UnicodeDecodeError:
        return None
    return _part(Part, (name, part, parts, number, slot, count, payload[begin:]))


def number_of(one: tuple[int, Part]) -> int:
    """Return the number of a note, or of a part of it, with its peer."""
    return one[1].number


class NoteQueue:
    """Notes that have come and that nobody has taken.

    Attributes:
        waiting: them, with the names of their senders, the oldest first. Without a lock it is only looked at.
    """

    def __init__(self, most_notes: int = KEPT_NOTES, most_bytes: int = KEPT_BYTES) -> None:
        self._most_notes, self._most_bytes = most_notes, most_bytes
        self._lock = Lock()
        self.waiting: deque[tuple[str, bytes]] = deque()
        self._bytes = 0
        self._unfinished = UnfinishedMessages(UNFINISHED_NOTES, most_bytes)
        self._dropped = 0

    @property
    def dropped(self) -> int:
        """How many notes were dropped because nobody took them, or parts of them did not come."""
        return self._dropped + self._unfinished.dropped

    def take_in(self, parts: list[tuple[int, Part]]) -> None:
        """Keep notes and parts of notes, with the numbers of their peers, which are put in order."""
        with self._lock:
            for name, note in self._whole(parts):
                self.waiting.append((name, note))
                self._bytes += len(note)
            while len(self.waiting) > self._most_notes or self._bytes > self._most_bytes:
                self._drop_oldest()

    def hand_over(self, parts: list[tuple[int, Part]], into: dict[str, list[bytes]]) -> None:
        """Move all notes, those that are kept and these, into lists by the name of their sender."""
        with self._lock:
            for name, note in self.waiting:
                into.setdefault(name, []).append(note)
            self.waiting.clear()
            self._bytes = 0
            for name, note in self._whole(parts):
                if name in into:
                    into[name].append(note)
                else:
                    into[name] = [note]

    def _whole(self, parts: list[tuple[int, Part]]) -> list[tuple[str, bytes]]:
        """Return the notes that are whole with these parts; under the lock."""
        if len(parts) > 1:
            parts.sort(key=number_of)
        whole: list[tuple[str, bytes]] = []
        for peer, part in parts:
            if part.parts == 1:
                whole.append((part.name, part.payload))
            else:
                note = self._unfinished.join(peer, part.number, part.part, part.parts, part.payload)
                if note is not None:
                    whole.append((part.name, note))
        return whole

    def _drop_oldest(self) -> None:
        name, note = self.waiting.popleft()
        self._bytes -= len(note)
        self._dropped += 1
        if self.dropped == 1:
            logger.warning(
                "nobody takes the notes of this agent: beyond %d notes or %d bytes the oldest are dropped, first one "
                "of %r; call get_new_notifs(), or send none",
                self._most_notes,
                self._most_bytes,
                name,
            )
