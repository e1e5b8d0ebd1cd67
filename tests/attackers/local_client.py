"""A connection to a `local` rail: its unix socket, and memory files that we made and may lie in.

The target answers over a connection of its own, to the socket that our address names.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from engine_wire import Claimant, Message, Target
from local_wire import (
    BOARD_BYTES,
    BOARD_MAGIC,
    ENTRIES,
    ENTRY,
    HEAD,
    LAYOUT,
    MOST_INLINE,
    SEGMENT_MAGIC,
    SLEEP,
    STAGING_BYTES,
    WIRE,
    WIRE_BYTES,
    Entry,
    Layout,
    Place,
    Wire,
    entry,
    wire,
)

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_atomics = ctypes.CDLL("libatomic.so.1")
_exchange = _atomics["__atomic_exchange_8"]
_SEQ_CST = 5


def memory(length: int, seals: int = SEALS) -> tuple[int, mmap.mmap]:
    """Return a new memory file and its bytes."""
    handle = os.memfd_create("attacker", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(handle, length)
    mapped = mmap.mmap(handle, length)
    fcntl.fcntl(handle, fcntl.F_ADD_SEALS, seals)
    return handle, mapped


def start_of(pid: int) -> int:
    """Return when a process began, as the kernel counts."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


class LocalClient:
    """One connection; `ours` is whom it claims to be, and where it listens.

    Attributes:
        segment: of our ring, where the target reads what we send.
        board: of the target, once it welcomed the connection.
        doorbell, their_doorbell: both ends of the connection's; the target has the second one too.
    """

    def __init__(self, target: Target, *, connect: bool = True, entries: int = ENTRIES) -> None:
        self.target, self.place, self.layout = target, Place.parse(target.rail), Layout(entries)
        self._name = b"attacker-%d-%x" % (os.getpid(), secrets.randbits(48))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(b"\0" + self._name)
        self._listener.listen(8)
        us = Place(self.place.host, os.getpid(), start_of(os.getpid()), secrets.randbits(63) | 1, self._name)
        self.us = us
        self.ours = target.with_rail(secrets.randbits(63) | 1, bytes(us))
        self.segment_file, self.segment = memory(self.layout.total)
        struct.pack_into("<QII", self.segment, 0, SEGMENT_MAGIC, LAYOUT, entries)
        self.board_file, self.our_board = memory(BOARD_BYTES)
        struct.pack_into("<QI", self.our_board, 0, BOARD_MAGIC, LAYOUT)
        self.doorbell, self.their_doorbell = socket.socketpair()
        self._rung_for = 0
        self.files: list[int] = []
        self.tail = self._staged = 0
        self._back: socket.socket | None = None
        self._their_ring: mmap.mmap | None = None
        self._their_layout, self._head = self.layout, 0
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(2.0)
        self.socket.connect(b"\0" + self.place.socket)
        if connect:
            self.connect()

    def connect(self) -> None:
        """Shake hands, as a rail does."""
        hello = wire(
            Wire.HELLO,
            target=self.place.rail,
            rail=self.us.rail,
            start=self.us.start,
            entries=self.layout.entries,
            files=3,
        )
        socket.send_fds(self.socket, [hello], [self.segment_file, self.board_file, self.their_doorbell.fileno()])
        answer, files, _, _ = socket.recv_fds(self.socket, WIRE_BYTES, 4)
        self.files += files
        fields = WIRE.unpack_from(answer)
        assert fields[1] == Wire.WELCOME and fields[3] == 0 and len(files) == 1, (
            f"not welcome: {fields}, {len(files)} files"
        )
        self.board = self.board_of_target(mmap.PROT_READ)

    def board_of_target(self, protection: int) -> mmap.mmap:
        """Map the target's board."""
        return mmap.mmap(self.files[0], BOARD_BYTES, prot=protection)

    def publish(self, words: bytes) -> None:
        """Put an entry into the ring, once there is room, and wake the target."""
        deadline = time.monotonic() + 2.0
        while self.tail - struct.unpack_from("<Q", self.segment, HEAD)[0] >= self.layout.entries:
            if time.monotonic() > deadline:
                raise TimeoutError("the target takes no entries")
            time.sleep(0.001)
        at = self.layout.ring + self.tail % self.layout.entries * ENTRY
        self.segment[at + 8 : at + ENTRY] = words
        self.tail += 1
        word = ctypes.c_uint64.from_buffer(self.segment, at)
        _exchange(ctypes.byref(word), ctypes.c_uint64(self.tail), _SEQ_CST)
        self.wake()

    def wake(self) -> None:
        """Announce that there is news."""
        sleep = struct.unpack_from("<Q", self.board, SLEEP)[0]
        if sleep not in (0, self._rung_for):
            self._rung_for = sleep
            self.doorbell.send(b"\0", socket.MSG_DONTWAIT)

    def send_message(self, message: bytes) -> None:
        """Send one message of the engine."""
        if len(message) <= MOST_INLINE:
            self.publish(entry(Entry.MESSAGE, inlined=1, length=len(message), rest=message))
            return
        if self._staged + len(message) > STAGING_BYTES:
            self._staged = 0
        at, self._staged = self._staged, self._staged + len(message)
        self.segment[self.layout.staging + at : self.layout.staging + at + len(message)] = message
        self.publish(entry(Entry.MESSAGE, length=len(message), rest=struct.pack("<I", at)))

    def count(self, imm: int) -> None:
        """Count at the target, as a write does."""
        self.publish(entry(Entry.IMMEDIATES, count=1, rest=struct.pack("<I", imm)))

    def messages(self, patience_s: float) -> Iterator[Message]:
        """Yield the engine's messages to us, until none comes for so long or the connection ends."""
        deadline = time.monotonic() + patience_s
        try:
            if self._their_ring is None:
                self._accept(patience_s)
        except (TimeoutError, ConnectionError):
            return
        ring = self._their_ring
        assert ring is not None
        while time.monotonic() < deadline:
            at = self._their_layout.ring + self._head % self._their_layout.entries * ENTRY
            if struct.unpack_from("<Q", ring, at)[0] != self._head + 1:
                time.sleep(0.001)
                continue
            kind, _, _, inlined, length = struct.unpack_from("<BBBBI", ring, at + 8)
            start = at + 16 if inlined else self._their_layout.staging + struct.unpack_from("<I", ring, at + 16)[0]
            data = ring[start : start + length] if kind == Entry.MESSAGE else b""
            self._head += 1
            ctypes.c_uint64.from_buffer(ring, HEAD).value = self._head
            if data:
                yield Message.parse(data)
                deadline = time.monotonic() + patience_s

    def _accept(self, patience_s: float) -> None:
        self._listener.settimeout(patience_s)
        self._back, _ = self._listener.accept()
        self._back.settimeout(2.0)
        hello, files, _, _ = socket.recv_fds(self._back, WIRE_BYTES, 4)
        self.files += files
        self._their_layout = Layout(WIRE.unpack_from(hello)[7])
        self._their_ring = mmap.mmap(files[0], self._their_layout.total)
        welcome = wire(Wire.WELCOME, rail=self.us.rail, files=1)
        socket.send_fds(self._back, [welcome], [self.board_file])

    def claim(self, secret: bytes, patience_s: float = 1.0) -> Claimant | None:
        """Send hello and prove what there is to prove; None where the target does not welcome us."""
        claimant = Claimant(self.ours, self.target, secret)
        return claimant if claimant.is_let_in(self.send_message, self.messages(patience_s)) else None

    def close(self) -> None:
        """End the connection; what the target had of us goes with it."""
        for one in (self.socket, self._listener, self._back, self.doorbell, self.their_doorbell):
            if one is not None:
                one.close()
        for handle in (self.segment_file, self.board_file, *self.files):
            os.close(handle)
