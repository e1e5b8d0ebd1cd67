"""What `local` rails share: messages of the unix socket, and where things lie in the memory files. Pure.

Written from native/src/providers/local/peers/wire.h and memory/segment.h.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

LAYOUT: Final = 5
WIRE_BYTES: Final = 112
WIRE: Final = struct.Struct("<4sIIIQQQIIII")  # magic, kind, layout, status, rails, start, entries, number, slot, files
WIRE_MAGIC: Final = b"AFWL"
ADDRESS: Final = struct.Struct("<4sQQiQQB")  # magic, host's two numbers, process, its start, rail, bytes of the socket
SEGMENT_MAGIC: Final = 0x31746E65_6D676566
BOARD_MAGIC: Final = 0x31647261_6F426661
BOARD_SLOTS: Final = 32768
BOARD_HEAD: Final = 128
BOARD_BYTES: Final = BOARD_HEAD + 16 * BOARD_SLOTS
SLEEP: Final = 64  # in a board
ACTIVE, HELD, WAITING, HEAD = 64, 68, 192, 256  # in the head of a segment
RESULTS: Final = 4096
ENTRY: Final = 64
STAGING_BYTES: Final = 2 << 20
MOST_INLINE: Final = 48
ENTRIES: Final = 64


class Wire(IntEnum):
    """Kinds of messages of the socket."""

    HELLO = 1
    WELCOME = 2
    SHOW = 3
    SHOWN = 4


class Entry(IntEnum):
    """Kinds of entries of a ring."""

    IMMEDIATES = 1
    MESSAGE = 2
    WRITE = 3
    READ = 4


def page_up(count: int) -> int:
    """Round up to whole pages."""
    return -(-count // 4096) * 4096


@dataclass(frozen=True)
class Layout:
    """Where the parts of a segment with so many entries lie."""

    entries: int = ENTRIES

    @property
    def ring(self) -> int:
        """Of the entries."""
        return RESULTS + page_up(4 * self.entries)

    @property
    def staging(self) -> int:
        """Of bytes that do not fit into an entry."""
        return self.ring + page_up(ENTRY * self.entries)

    @property
    def total(self) -> int:
        """Bytes of the file."""
        return self.staging + STAGING_BYTES


@dataclass(frozen=True)
class Place:
    """Address of a `local` rail."""

    host: tuple[int, int]
    pid: int
    start: int
    rail: int
    socket: bytes

    @classmethod
    def parse(cls, rail: bytes) -> Place:
        """Parse the bytes of one."""
        magic, high, low, pid, start, number, length = ADDRESS.unpack_from(rail)
        assert magic == b"AFL1" and len(rail) == ADDRESS.size + length, (
            "the address has another form: adapt the attacker"
        )
        return cls((high, low), pid, start, number, rail[ADDRESS.size :])

    def __bytes__(self) -> bytes:
        return ADDRESS.pack(b"AFL1", *self.host, self.pid, self.start, self.rail, len(self.socket)) + self.socket


def wire(
    kind: int,
    *,
    layout: int = LAYOUT,
    status: int = 0,
    target: int = 0,
    rail: int = 0,
    start: int = 0,
    entries: int = 0,
    number: int = 0,
    slot: int = 0,
    files: int = 0,
) -> bytes:
    """Return a message of the socket."""
    head = WIRE.pack(WIRE_MAGIC, kind, layout, status, target, rail, start, entries, number, slot, files)
    return head.ljust(WIRE_BYTES, b"\0")


def entry(
    kind: int, *, count: int = 0, has_imm: int = 0, inlined: int = 0, length: int = 0, rest: bytes = b""
) -> bytes:
    """Return the words of an entry behind its sequence number."""
    return struct.pack("<BBBBI", kind, count, has_imm, inlined, length) + rest.ljust(MOST_INLINE, b"\0")
