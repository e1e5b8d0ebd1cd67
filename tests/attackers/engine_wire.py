"""The engine's own bytes as an attacker writes them: addresses, headers, hellos, challenges and proofs. Pure.

Written from native/src/engine/wire.h, admission.cc and secret/proof.h, and from nothing of ours that runs: a test that
shared the engine's code would share its mistakes.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

ADDRESS_MAGIC = b"AFA1"
MESSAGE_MAGIC = b"AFM2"
PURPOSE = b"asyncfabric peer 1"
PUBLIC_FRAME = struct.Struct(">4sBBHQ")  # in front of the engine's bytes in a FabricAddress
HEADER = struct.Struct("<4sIQQQ")
CODE_BYTES = 32
NONCE_BYTES = 16
OUR_LIFE = 1


class Kind(IntEnum):
    """Kinds of messages."""

    HELLO = 1
    WELCOME = 2
    REJECT = 3
    PING = 4
    PONG = 5
    USER = 6
    CREDIT = 7
    CLOSED = 8
    CLOSED_ACK = 9
    BYE = 10
    ASK_KEY = 11
    KEY_VERDICT = 12
    REVOKED = 13
    ASK_CREDIT = 14
    ASK_COUNTERS = 15
    COUNTERS = 16
    CHALLENGE = 17
    PROOF = 18
    REFUSED = 19


def checksum(data: bytes) -> int:
    """Return the checksum of addresses (FNV-1a)."""
    found = 0xCBF29CE484222325
    for byte in data:
        found = (found ^ byte) * 0x100000001B3 & (1 << 64) - 1
    return found


@dataclass(frozen=True)
class Target:
    """Where a fabric is: its incarnation, its host's number and the address of its one rail."""

    incarnation: int
    host: int
    protocol: bytes
    rail: bytes

    @classmethod
    def parse(cls, address: bytes) -> Target:
        """Parse `bytes(fabric.address)` of a fabric with one rail."""
        engine = address[PUBLIC_FRAME.size :]
        assert engine[:4] == ADDRESS_MAGIC, "the address has another form: adapt the attacker"
        assert struct.unpack("<Q", engine[-8:])[0] == checksum(engine[:-8])
        incarnation, host, rails, length = struct.unpack_from("<QQBB", engine, 4)
        assert rails == 1
        protocol = engine[22 : 22 + length]
        (rail_length,) = struct.unpack_from("<H", engine, 22 + length)
        return cls(incarnation, host, protocol, engine[24 + length : 24 + length + rail_length])

    def with_rail(self, incarnation: int, rail: bytes) -> Target:
        """Return an address of somebody else on the same host."""
        return Target(incarnation, self.host, self.protocol, rail)

    @property
    def engine_bytes(self) -> bytes:
        """The engine's form."""
        head = struct.pack("<QQBB", self.incarnation, self.host, 1, len(self.protocol)) + self.protocol
        body = ADDRESS_MAGIC + head + struct.pack("<H", len(self.rail)) + self.rail
        return body + struct.pack("<Q", checksum(body))

    @property
    def public_bytes(self) -> bytes:
        """The form of `FabricAddress.from_bytes`."""
        engine = self.engine_bytes
        return PUBLIC_FRAME.pack(b"AFad", 1, 0, len(engine), self.incarnation) + engine


@dataclass(frozen=True)
class Message:
    """A header and what follows it."""

    kind: int
    sender: int
    target: int
    value: int = 0
    life: int = 0
    payload: bytes = b""

    @property
    def header(self) -> bytes:
        """The header's bytes."""
        return HEADER.pack(MESSAGE_MAGIC, self.kind | self.life << 8, self.sender, self.target, self.value)

    def __bytes__(self) -> bytes:
        return self.header + self.payload

    def sealed(self, secret: bytes, address: bytes) -> bytes:
        """Return it with a code of this secret, for the rail at this address."""
        return bytes(self) + code_of(secret, address, self.header, self.payload)

    @classmethod
    def parse(cls, data: bytes) -> Message:
        """Parse one; raises for anything else."""
        magic, word, sender, target, value = HEADER.unpack_from(data)
        assert magic == MESSAGE_MAGIC
        return cls(word & 0xFF, sender, target, value, word >> 8, data[HEADER.size :])


def code_of(secret: bytes, address: bytes, header: bytes, payload: bytes) -> bytes:
    """Return what proves a message."""
    parts = (struct.pack("<I", len(address)), address, struct.pack("<I", len(header)), header, payload)
    return hmac.digest(secret, PURPOSE + b"".join(parts), "sha256")


class Claimant:
    """One who wants to be a peer: `secret` is right, wrong, or b"" for a hello without any."""

    def __init__(self, ours: Target, theirs: Target, secret: bytes) -> None:
        self.ours, self.theirs, self.secret = ours, theirs, secret
        self.nonce = os.urandom(NONCE_BYTES)
        self.their_life = 0
        self.sent: list[bytes] = []

    def hello(self) -> bytes:
        """Return the hello."""
        address = self.ours.engine_bytes
        payload = struct.pack("<H", len(address)) + address + bytes([bool(self.secret)]) + self.nonce
        message = self.message(Kind.HELLO, OUR_LIFE << 32, payload)
        self.sent.append(message.sealed(self.secret, self.theirs.rail) if self.secret else bytes(message))
        return self.sent[-1]

    def message(self, kind: Kind, value: int = 0, payload: bytes = b"") -> Message:
        """Return a message to the target."""
        return Message(kind, self.ours.incarnation, self.theirs.incarnation, value, self.their_life, payload)

    def answer(self, challenge: Message) -> bytes:
        """Return the proof that a challenge asks for."""
        self.their_life = challenge.value >> 32
        theirs = challenge.payload[NONCE_BYTES : 2 * NONCE_BYTES]
        (lane,) = struct.unpack_from("<I", challenge.payload, 2 * NONCE_BYTES)
        payload = theirs + self.nonce + struct.pack("<Q", 1 << lane)
        self.sent.append(self.message(Kind.PROOF, OUR_LIFE << 32, payload).sealed(self.secret, self.theirs.rail))
        return self.sent[-1]

    def is_let_in(self, send: Callable[[bytes], None], messages: Iterable[Message]) -> bool:
        """Send hello and prove what there is to prove; return whether the target welcomes us meanwhile."""
        send(self.hello())
        for message in messages:
            if message.kind == Kind.CHALLENGE:
                send(self.answer(message))
            elif message.kind in (Kind.WELCOME, Kind.REFUSED):
                return message.kind == Kind.WELCOME
        return False
