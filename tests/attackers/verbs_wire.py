"""What `verbs` rails send to each other to set up queue pairs: addresses and datagrams. Pure.

Written from native/src/providers/verbs/peers/wire.h.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from engine_wire import checksum

ADDRESS: Final = struct.Struct("<BBQI16sHBBII")  # magic, version, rail, life, GID, LID, MTU, Ethernet, number, key
HEAD: Final = struct.Struct("<BBBBQQI")  # magic, version, kind, lanes, target, connection, attempt
REST: Final = struct.Struct("<HHQI")  # credits, code, key, number
ADDRESS_MAGIC: Final = 0xA9
DATAGRAM_MAGIC: Final = 0xD9
VERSION: Final = 2
BULK, SIGNALS = 0, 1  # lanes; messages go over the second


class Post(IntEnum):
    """Kinds of datagrams."""

    REQUEST = 1
    REPLY = 2
    REFUSAL = 3
    BYE = 4
    BYE_REPLY = 5
    MOVED = 6
    ASK_KEY = 7
    KEY = 8


@dataclass(frozen=True)
class Box:
    """Address of a `verbs` rail: its queue pair for datagrams."""

    incarnation: int
    gid: bytes
    number: int
    key: int
    life: int = 1
    mtu: int = 3

    @classmethod
    def parse(cls, rail: bytes) -> Box:
        """Parse the bytes of one."""
        magic, version, incarnation, life, gid, _, mtu, ethernet, number, key = ADDRESS.unpack(rail)
        assert (magic, version, ethernet) == (ADDRESS_MAGIC, VERSION, 1), "the address has another form: adapt it"
        return cls(incarnation, gid, number, key, life, mtu)

    def __bytes__(self) -> bytes:
        fields = (self.incarnation, self.life, self.gid, 0, self.mtu, 1, self.number, self.key)
        return ADDRESS.pack(ADDRESS_MAGIC, VERSION, *fields)


@dataclass(frozen=True)
class Datagram:
    """One datagram; `ends` are number and first sequence number of the queue pair of each lane."""

    kind: int
    target: int
    connection: int
    sender: Box
    attempt: int = 1
    lanes: int = 3
    ends: tuple[tuple[int, int], ...] = field(default=((0, 0), (0, 0)))
    credits: int = 0
    code: int = 0
    key: int = 0
    number: int = 0

    def __bytes__(self) -> bytes:
        head = HEAD.pack(DATAGRAM_MAGIC, VERSION, self.kind, self.lanes, self.target, self.connection, self.attempt)
        ends = b"".join(struct.pack("<II", *end) for end in self.ends)
        body = head + ends + REST.pack(self.credits, self.code, self.key, self.number) + bytes(self.sender)
        return body + struct.pack("<Q", checksum(body))

    @classmethod
    def parse(cls, data: bytes) -> Datagram:
        """Parse one; raises for anything else."""
        assert struct.unpack("<Q", data[-8:])[0] == checksum(data[:-8])
        magic, version, kind, lanes, target, connection, attempt = HEAD.unpack_from(data)
        assert (magic, version) == (DATAGRAM_MAGIC, VERSION)
        numbers = struct.unpack_from("<IIII", data, HEAD.size)
        rest = REST.unpack_from(data, HEAD.size + 16)
        sender = Box.parse(data[HEAD.size + 16 + REST.size : -8])
        return cls(kind, target, connection, sender, attempt, lanes, (numbers[:2], numbers[2:]), *rest)
