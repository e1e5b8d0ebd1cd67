"""What a stranger of the same user tries on a `local` rail besides: at its socket, and in the memory that it shares."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import socket
import struct
import time
from contextlib import suppress

from attacks import BURST, Attack, Prey
from local_client import LocalClient, memory, start_of
from local_wire import (
    ACTIVE,
    BOARD_BYTES,
    BOARD_HEAD,
    BOARD_MAGIC,
    ENTRY,
    HEAD,
    HELD,
    LAYOUT,
    RESULTS,
    SLEEP,
    WAITING,
    WIRE_BYTES,
    Entry,
    Layout,
    Place,
    Wire,
    entry,
    wire,
)

HELD_SOCKETS = 40
_held: list[socket.socket] = []


def door(prey: Prey) -> socket.socket:
    """Return a connection to the target's socket, without a word."""
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.settimeout(1.0)
    one.connect(b"\0" + Place.parse(prey.target.rail).socket)
    return one


def stays_mute(prey: Prey) -> str:
    """Connect and send nothing, as often as it goes; the oldest leaves."""
    for _ in range(8):
        _held.append(door(prey))
    while len(_held) > HELD_SOCKETS:
        _held.pop(0).close()
    return ""


def stops_in_the_middle(prey: Prey) -> str:
    """Send half a hello, or one of another layout, or one whose files are missing."""
    place = Place.parse(prey.target.rail)
    whole = wire(Wire.HELLO, target=place.rail, rail=1, start=start_of(os.getpid()), entries=64)
    for data in (whole[: WIRE_BYTES // 2], whole + whole, b"", wire(Wire.HELLO, layout=99), whole, wire(Wire.SHOWN)):
        with door(prey) as one:
            one.send(data)
    return ""


def hands_over_wrong_files(prey: Prey) -> str:
    """Send hello with files that are pipes, can shrink, are short, or are not enough."""
    place = Place.parse(prey.target.rail)
    reading, writing = os.pipe()
    loose, _ = memory(Layout().total, seals=0)
    short, _ = memory(4096)
    whole, _ = memory(Layout().total)
    board, bytes_of_board = memory(BOARD_BYTES)
    struct.pack_into("<QI", bytes_of_board, 0, BOARD_MAGIC, LAYOUT)
    ring = os.eventfd(0)
    ours, theirs = socket.socketpair()
    bell = theirs.fileno()
    wrong = (
        [writing, board, bell],
        [loose, board, bell],
        [short, board, bell],
        [whole],
        [whole, short, bell],
        [whole, board, writing],
        [whole, board, ring],
        [whole, board, door(prey).detach()],
    )
    try:
        for files in wrong:
            with door(prey) as one:
                hello = wire(
                    Wire.HELLO,
                    target=place.rail,
                    rail=secrets.randbits(63),
                    start=start_of(os.getpid()),
                    entries=64,
                    files=len(files),
                )
                socket.send_fds(one, [hello], files)
                answer, got, _, _ = socket.recv_fds(one, WIRE_BYTES, 4)
                for handle in got:
                    os.close(handle)
                if got:
                    return f"it was welcome with {files}: {answer.hex()}"
    finally:
        for handle in (reading, writing, loose, short, whole, board, ring, wrong[-1][-1]):
            os.close(handle)
        ours.close()
        theirs.close()
    return ""


def asks_for_regions(prey: Prey) -> str:
    """Show what the board has of each region as if it were the word of a key, and ask for the files."""
    client = LocalClient(prey.target)
    try:
        for slot in range(16):
            word = struct.unpack_from("<Q", client.board, BOARD_HEAD + 16 * slot)[0]
            ask = bytearray(wire(Wire.SHOW, slot=slot))
            struct.pack_into("<Q", ask, 56, word)
            client.socket.send(ask)
            _, files, _, _ = socket.recv_fds(client.socket, WIRE_BYTES, 4)
            client.files += files
            if files:
                return f"it got the file of region {slot}"
    finally:
        client.close()
    return ""


def writes_through_the_ring(prey: Prey) -> str:
    """Read and write regions by entries of the ring, and count."""
    client = LocalClient(prey.target)
    try:
        for slot in range(16):
            word = struct.unpack_from("<Q", client.board, BOARD_HEAD + 16 * slot)[0]
            body = struct.pack("<QQIIII", word, 0, slot, 0, prey.dice.getrandbits(32), 0)
            for kind in (Entry.WRITE, Entry.READ):
                client.publish(entry(kind, has_imm=1, length=64, rest=body))
            client.count(prey.dice.getrandbits(32))
            client.count(prey.dice.randrange(1 << 12))
        deadline = time.monotonic() + 1.0
        while struct.unpack_from("<Q", client.segment, HEAD)[0] < client.tail and time.monotonic() < deadline:
            time.sleep(0.001)
        if any(client.segment[client.layout.staging : client.layout.staging + 64]):
            return "it read a region"
    finally:
        client.close()
    return ""


def lies_in_entries(prey: Prey) -> str:
    """Publish entries whose lengths, kinds and places are lies."""
    lies = (
        entry(99),
        entry(Entry.IMMEDIATES, count=200),
        entry(Entry.MESSAGE, length=1 << 31, rest=struct.pack("<I", 0)),
        entry(Entry.MESSAGE, length=16000, rest=struct.pack("<I", (2 << 20) - 1)),
        entry(Entry.MESSAGE, inlined=1, length=49),
        entry(Entry.WRITE, length=(1 << 32) - 1, rest=struct.pack("<QQIIII", 1, 1 << 63, 0xFFFFFFFF, 0xFFFFFFFF, 0, 0)),
    )
    for lie in lies:
        client = LocalClient(prey.target)
        try:
            client.publish(lie)
        finally:
            client.close()
    return ""


def lies_in_shared_memory(prey: Prey) -> str:
    """Scribble over the head of the segment and its ring while the target reads them."""
    client = LocalClient(prey.target)
    try:
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            for at in (HEAD, WAITING, ACTIVE, RESULTS):
                client.segment[at : at + 8] = os.urandom(8)
            for place in range(client.layout.entries):
                at = client.layout.ring + place * ENTRY
                client.segment[at : at + ENTRY] = os.urandom(ENTRY)
                if prey.dice.random() < 0.5:
                    ctypes.c_uint64.from_buffer(client.segment, at).value = place + 1
            client.wake()
    finally:
        client.close()
    return ""


def holds_regions(prey: Prey) -> str:
    """State for a while that we are touching every region, so that revoking and releasing wait for us."""
    clients = [LocalClient(prey.target) for _ in range(8)]
    try:
        for number, client in enumerate(clients):
            struct.pack_into("<I", client.segment, ACTIVE, number + 1)
            struct.pack_into("<16I", client.segment, HELD, *range(16 * number + 1, 16 * number + 17))
        time.sleep(0.4)
    finally:
        for client in clients:
            client.close()
    return ""


def floods_the_ring(prey: Prey) -> str:
    """Keep the ring full of messages that the target has to look at."""
    client = LocalClient(prey.target)
    try:
        for _ in range(20 * BURST):
            client.send_message(b"nonsense")
    finally:
        client.close()
    return ""


def comes_and_goes(prey: Prey) -> str:
    """Connect with a whole handshake and leave, again and again."""
    for _ in range(20):
        LocalClient(prey.target).close()
    return ""


def clears_flags(prey: Prey) -> str:
    """Clear all by which anybody could announce that it sleeps or has news, as far as it lets itself be written."""
    client = LocalClient(prey.target)
    try:
        try:
            client.board_of_target(mmap.PROT_READ | mmap.PROT_WRITE)
            return "the board of the target is writable"
        except PermissionError:
            pass
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            client.segment[ACTIVE : client.layout.ring] = bytes(client.layout.ring - ACTIVE)
            struct.pack_into("<Q", client.our_board, SLEEP, prey.dice.getrandbits(64))
    finally:
        client.close()
    return ""


def fills_doorbells(prey: Prey) -> str:
    """Fill the doorbell from both ends, make it block, and want to be rung; or empty it, or end it."""
    client = LocalClient(prey.target)
    try:
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            for end in (client.doorbell, client.their_doorbell):
                end.setblocking(False)
                with suppress(BlockingIOError):
                    while True:
                        end.send(bytes(prey.dice.randrange(1, 4096)))
                end.setblocking(True)
            struct.pack_into("<I", client.segment, WAITING, 1)
            struct.pack_into("<Q", client.our_board, SLEEP, prey.dice.getrandbits(64))
            client.send_message(b"wake us")
            time.sleep(0.001)
        with suppress(BlockingIOError):
            client.their_doorbell.recv(1 << 16, socket.MSG_DONTWAIT)
        client.their_doorbell.shutdown(socket.SHUT_RDWR)
        client.count(1)
    finally:
        client.close()
    return ""


LOCAL: tuple[Attack, ...] = (
    stays_mute,
    stops_in_the_middle,
    hands_over_wrong_files,
    asks_for_regions,
    writes_through_the_ring,
    lies_in_entries,
    lies_in_shared_memory,
    holds_regions,
    floods_the_ring,
    comes_and_goes,
    clears_flags,
    fills_doorbells,
)
