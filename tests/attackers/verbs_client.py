"""A connection to a `verbs` rail with queue pairs of our own: libibverbs by `verbs_door.c`, which is compiled here.

The target answers over a connection of its own, to the queue pair for datagrams that our address names.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from engine_wire import Claimant, Message, Target
from verbs_wire import SIGNALS, Box, Datagram, Post

SEND, WRITE, COUNT, READ = range(4)
NOTHING, ENDED = -1, -2
MOST_BYTES = 1 << 15
CREDITS = 8
PATIENCE_S = 60.0  # the emulated machine of soft-RoCE may take seconds for what takes milliseconds elsewhere


@cache
def library() -> Any:
    """Compile and load what works the device."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "door.so"
        source = Path(__file__).with_name("verbs_door.c")
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", made, source, "-libverbs"], check=True)
        loaded = ctypes.CDLL(str(made))
    number, text, handle = ctypes.c_uint32, ctypes.c_char_p, ctypes.c_void_p
    loaded.door_open.restype = loaded.pair_open.restype = handle
    loaded.door_take.restype = loaded.pair_take.restype = ctypes.c_long
    loaded.door_open.argtypes = [text, number, text, handle]
    loaded.door_close.argtypes = loaded.pair_close.argtypes = [handle]
    loaded.door_send.argtypes = [handle, text, number, number, text, number]
    loaded.door_take.argtypes = [handle, text]
    loaded.pair_open.argtypes = [handle, handle]
    loaded.pair_join.argtypes = [handle, handle, text, ctypes.c_int, number, number, number]
    loaded.pair_post.argtypes = [handle, ctypes.c_int, text, number, number, ctypes.c_uint64, number]
    loaded.pair_take.argtypes = [handle, text, handle]
    return loaded


class QueuePair:
    """One reliable queue pair of ours."""

    def __init__(self, door: Any) -> None:
        number = ctypes.c_uint32()
        self._door, self._pair = door, library().pair_open(door, ctypes.byref(number))
        if not self._pair:
            raise OSError("the device has no queue pair left")
        self.end = (number.value, secrets.randbits(24))

    def join(self, box: Box, end: tuple[int, int]) -> None:
        """Join it to a queue pair of somebody."""
        status = library().pair_join(self._door, self._pair, box.gid, box.mtu, *end, self.end[1])
        if status:
            raise OSError(status, os.strerror(status))

    def post(self, work: int, data: bytes = b"", imm: int = 0, at: int = 0, key: int = 0) -> None:
        """Post something."""
        if library().pair_post(self._pair, work, data, len(data), imm, at, key):
            raise BlockingIOError("the queue is full, or broken")

    def take(self) -> tuple[int, bytes]:
        """Return NOTHING, ENDED, or the length of a message; and its bytes."""
        room, status = ctypes.create_string_buffer(MOST_BYTES), ctypes.c_int()
        length = library().pair_take(self._pair, room, ctypes.byref(status))
        return (length, room.raw[:length]) if length >= 0 else (length, b"%d" % status.value)

    def outcome(self, patience_s: float = PATIENCE_S) -> bool:
        """Wait for the end of what was posted; return whether it went well."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            length, status = self.take()
            if length == ENDED:
                return status == b"0"
            time.sleep(0.001)
        return False

    def close(self) -> None:
        """Give it back."""
        library().pair_close(self._pair)


class VerbsClient:
    """One connection; `ours` is whom it claims to be, and where it takes datagrams."""

    def __init__(self, target: Target, *, connect: bool = True) -> None:
        self.target, self.box = target, Box.parse(target.rail)
        gid, number, key = ctypes.create_string_buffer(16), ctypes.c_uint32(), secrets.randbits(31)
        device = min(os.listdir("/sys/class/infiniband"))
        self._door = library().door_open(device.encode(), key, gid, ctypes.byref(number))
        if not self._door:
            raise OSError("the device could not be opened")
        self.us = Box(secrets.randbits(63) | 1, gid.raw, number.value, key)
        self.ours = target.with_rail(secrets.randbits(63) | 1, bytes(self.us))
        self.connection = secrets.randbits(64)
        self.pairs: list[QueuePair] = []
        self._back: list[QueuePair] = []
        self._answers: dict[int, bytes] = {}
        if connect:
            try:
                self.connect()
            except BaseException:
                self.close()
                raise

    def request(self, connection: int, ends: tuple[tuple[int, int], ...], attempt: int = 1) -> Datagram:
        """Return what asks for the other ends of queue pairs."""
        return Datagram(Post.REQUEST, self.box.incarnation, connection, self.us, attempt, ends=ends)

    def connect(self, attempt: int = 1) -> None:
        """Open our direction: both lanes, in place of those of an earlier attempt."""
        for pair in self.pairs:
            pair.close()
        self.pairs = [QueuePair(self._door) for _ in range(2)]
        ends = tuple(pair.end for pair in self.pairs)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self.post(bytes(self.request(self.connection, ends, attempt)))
            for reply in self._datagrams(0.5):
                if reply.connection != self.connection or reply.attempt != attempt:
                    continue
                if reply.kind == Post.REFUSAL:
                    raise ConnectionRefusedError(f"refused with {reply.code}")
                for pair, end in zip(self.pairs, reply.ends, strict=True):
                    pair.join(reply.sender, end)
                return
        raise TimeoutError("the target does not answer")

    def post(self, data: bytes) -> None:
        """Send a datagram to the target."""
        library().door_send(self._door, self.box.gid, self.box.number, self.box.key, data, len(data))

    def send_message(self, message: bytes) -> None:
        """Send one message of the engine, once those before it have left."""
        pair = self.pairs[SIGNALS]
        while pair.take()[0] != NOTHING:
            pass
        pair.post(SEND, message)
        if not pair.outcome():
            raise ConnectionResetError("the target takes no message")

    def count(self, imm: int, lane: int = SIGNALS) -> None:
        """Count at the target, as a write does."""
        self.pairs[lane].post(COUNT, imm=int.from_bytes(imm.to_bytes(4, "big"), "little"))

    def messages(self, patience_s: float) -> Iterator[Message]:
        """Yield the engine's messages to us, until none comes for so long or the connection ends."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            for _ in self._datagrams(0.0):
                pass
            for pair in self._back:
                length, data = pair.take()
                if length > 0:
                    yield Message.parse(data)
                    deadline = time.monotonic() + patience_s
            time.sleep(0.001)

    def _datagrams(self, patience_s: float) -> Iterator[Datagram]:
        """Yield what comes; who asks for a connection to us gets it."""
        deadline, room = time.monotonic() + patience_s, ctypes.create_string_buffer(MOST_BYTES)
        while True:
            length = library().door_take(self._door, room)
            if length > 0:
                came = Datagram.parse(room.raw[:length])
                if came.kind == Post.REQUEST:
                    self._answer(came)
                else:
                    yield came
            elif time.monotonic() >= deadline:
                return
            else:
                time.sleep(0.001)

    def _answer(self, request: Datagram) -> None:
        if request.connection not in self._answers:
            pairs = [QueuePair(self._door) for _ in range(2)]
            self._back += pairs
            for pair, end in zip(pairs, request.ends, strict=True):
                pair.join(request.sender, end)
            ends = tuple(pair.end for pair in pairs)
            target, number = request.sender.incarnation, request.connection
            reply = Datagram(Post.REPLY, target, number, self.us, request.attempt, request.lanes, ends, CREDITS)
            self._answers[number] = bytes(reply)
        to = request.sender
        answer = self._answers[request.connection]
        library().door_send(self._door, to.gid, to.number, to.key, answer, len(answer))

    def claim(self, secret: bytes, patience_s: float = 1.0) -> Claimant | None:
        """Send hello and prove what there is to prove; None where the target does not welcome us."""
        claimant = Claimant(self.ours, self.target, secret)
        return claimant if claimant.is_let_in(self.send_message, self.messages(patience_s)) else None

    def close(self) -> None:
        """End the connection, in both directions."""
        self.post(bytes(Datagram(Post.BYE, self.box.incarnation, self.connection, self.us)))
        for pair in (*self.pairs, *self._back):
            pair.close()
        self.pairs, self._back = [], []
        library().door_close(self._door)
