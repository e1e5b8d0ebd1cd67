"""A connection to a `tcp` rail that speaks libfabric's bytes over a plain socket: prov/net, protocol version 3.

The target answers over a connection of its own, to where our address leads.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Iterator
from enum import IntEnum

from engine_wire import Claimant, Message, Target

CONNECT = struct.Struct("<BBHIQQQ")  # ofi_ctrl_hdr: version, type, bytes that follow (big endian), ..., our byte order
ENDPOINT = struct.Struct(">BBHI")  # version, reserved, port, process
BASE = struct.Struct("<BBHBBBBQ")  # version, op, flags, op data, ranges, bytes of the header, id, bytes of all
HEAD = struct.Struct("<BBB5xQ")  # of asyncfabric's messages over libfabric
RAIL = struct.Struct("<BBIQQH")  # of asyncfabric's rail addresses over libfabric
VERSION, MESSAGE, WRITE = 3, 0, 4
OURS = 2  # version of asyncfabric's bytes over libfabric
CQ_DATA, DELIVERED, ACKNOWLEDGED = 1, 4, 2


class Part(IntEnum):
    """Kinds of asyncfabric's messages over libfabric."""

    PAYLOAD = 1
    INTRODUCE = 2
    FENCE_ASK = 3
    FENCE_ANSWER = 4
    FENCE_GONE = 5


def place_of(target: Target) -> tuple[str, int]:
    """Return host and port of a rail."""
    family, port = (
        struct.unpack_from("<H", target.rail, RAIL.size)[0],
        struct.unpack_from(">H", target.rail, RAIL.size + 2),
    )
    assert family == socket.AF_INET
    return socket.inet_ntoa(target.rail[RAIL.size + 4 : RAIL.size + 8]), port[0]


def rail_at(target: Target, port: int) -> bytes:
    """Return the address of a rail like the target's at a port of this host."""
    name = struct.pack("<H", socket.AF_INET) + struct.pack(">H", port) + socket.inet_aton("127.0.0.1") + bytes(8)
    return target.rail[: RAIL.size] + name


class TcpClient:
    """One connection; `ours` is whom it claims to be."""

    def __init__(self, target: Target, *, connect: bool = True) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.number = secrets.randbits(64)
        self.ours = target.with_rail(secrets.randbits(63) | 1, rail_at(target, self.port))
        self._back: socket.socket | None = None
        self._taken = b""
        self.socket = socket.create_connection(place_of(target), 2.0)
        if connect:
            self.socket.sendall(self.request())
            answer = CONNECT.size + ENDPOINT.size
            assert len(self.socket.recv(answer, socket.MSG_WAITALL)) == answer

    def request(self) -> bytes:
        """Return what opens a connection."""
        head = CONNECT.pack(VERSION, 0, socket.htons(ENDPOINT.size), 0, 0, 0, 1)
        return head + ENDPOINT.pack(0, 0, self.port, os.getpid() ^ secrets.randbits(20))

    def frame(self, payload: bytes, part: Part = Part.PAYLOAD, number: int | None = None) -> bytes:
        """Return a message as it goes over the socket."""
        body = HEAD.pack(0xC7, OURS, part, self.number if number is None else number) + payload
        return BASE.pack(VERSION, MESSAGE, 0, 0, 0, BASE.size, 0, BASE.size + len(body)) + body

    def introduction(self) -> bytes:
        """Return the introduction that precedes messages."""
        return self.frame(self.ours.rail, Part.INTRODUCE)

    def count(self, imm: int) -> bytes:
        """Return an empty write into the target's scratch word, with an immediate."""
        scratch_key, scratch_base = struct.unpack_from("<QQ", self.target.rail, 6)
        head = BASE.pack(VERSION, WRITE, CQ_DATA, 0, 1, BASE.size + 8 + 24, 0, BASE.size + 8 + 24)
        return head + struct.pack("<QQQQ", imm, scratch_base, 0, scratch_key)

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self.socket.sendall(data)

    def send_message(self, message: bytes) -> None:
        """Send one message of the engine."""
        self.send(self.frame(message))

    def messages(self, patience_s: float) -> Iterator[Message]:
        """Yield the engine's messages to us, until none comes for so long or the connection ends; confirms each."""
        self._listener.settimeout(patience_s)
        try:
            if self._back is None:
                self._back = self._accept()
            self._back.settimeout(patience_s)
            while True:
                _, op, flags, _, _, _, _, length = BASE.unpack(self._exactly(BASE.size))
                body = self._exactly(length - BASE.size)
                if op != MESSAGE or not body:
                    continue
                if flags & DELIVERED:
                    self._back.sendall(BASE.pack(VERSION, MESSAGE, 0, ACKNOWLEDGED, 0, BASE.size, 0, BASE.size))
                if HEAD.unpack_from(body)[2] == Part.PAYLOAD:
                    yield Message.parse(body[HEAD.size :])
        except (TimeoutError, ConnectionError):
            return

    def _accept(self) -> socket.socket:
        back, _ = self._listener.accept()
        back.settimeout(2.0)
        asked = back.recv(CONNECT.size + ENDPOINT.size, socket.MSG_WAITALL)
        back.sendall(asked[:1] + b"\1" + asked[2:])  # the answer has the form of the question
        return back

    def claim(self, secret: bytes, patience_s: float = 1.0) -> Claimant | None:
        """Send hello and prove what there is to prove; None where the target does not welcome us."""
        self.send(self.introduction())
        claimant = Claimant(self.ours, self.target, secret)
        return claimant if claimant.is_let_in(self.send_message, self.messages(patience_s)) else None

    def close(self) -> None:
        """End the connection."""
        self.socket.close()
        self._listener.close()
        if self._back is not None:
            self._back.close()

    def _exactly(self, count: int) -> bytes:
        assert self._back is not None
        while len(self._taken) < count:
            got = self._back.recv(65536)
            if not got:
                raise ConnectionResetError("the target closed the connection")
            self._taken += got
        taken, self._taken = self._taken[:count], self._taken[count:]
        return taken
