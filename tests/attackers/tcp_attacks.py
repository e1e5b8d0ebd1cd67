"""What a stranger tries on a `tcp` rail besides: libfabric's own bytes, cut, wrong, repeated, or none at all."""

from __future__ import annotations

import os
import socket
import struct

from attacks import BURST, Attack, Prey
from tcp_client import BASE, CONNECT, CQ_DATA, MESSAGE, VERSION, WRITE, Part, TcpClient, place_of

HELD_SOCKETS = 40
_held: list[socket.socket] = []


def _hold(one: socket.socket) -> None:
    _held.append(one)
    while len(_held) > HELD_SOCKETS:
        _held.pop(0).close()


def stays_mute(prey: Prey) -> str:
    """Connect and send nothing; the oldest leaves."""
    for _ in range(4):
        _hold(socket.create_connection(place_of(prey.target), 2.0))
    return ""


def stops_in_the_middle(prey: Prey) -> str:
    """Send half of what opens a connection, then of a message, and stop there."""
    client = TcpClient(prey.target, connect=False)
    client.send(client.request()[: CONNECT.size // 2])
    client.close()
    for data in (client.introduction()[:11], client.frame(b"x" * 4000)[:1000]):
        client = TcpClient(prey.target)
        client.send(data)
        _hold(client.socket.dup())
        client.close()
    return ""


def asks_wrongly(prey: Prey) -> str:
    """Open connections by requests of another version, another kind, a length that is none, and by nonsense."""
    for at, value in ((0, 9), (1, 7), (2, 0xFF)):
        client = TcpClient(prey.target, connect=False)
        request = bytearray(client.request())
        request[at] = value
        client.send(bytes(request))
        client.close()
    client = TcpClient(prey.target, connect=False)
    client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 8)
    client.close()
    return ""


def introduces_hundreds(prey: Prey) -> str:
    """Introduce writers that there are not, each of which a fence might ask."""
    client = TcpClient(prey.target)
    try:
        for _ in range(BURST):
            client.send(client.frame(client.ours.rail, Part.INTRODUCE, prey.dice.getrandbits(64)))
    finally:
        client.close()
    return ""


def answers_fences(prey: Prey) -> str:
    """Ask and answer fences of connections that are not ours."""
    client = TcpClient(prey.target)
    try:
        for part in (Part.FENCE_ASK, Part.FENCE_ANSWER, Part.FENCE_GONE):
            for number in (0, 1, 2, prey.dice.getrandbits(64)):
                client.send(client.frame(b"", part, number))
                client.send(client.frame(client.ours.rail, part, number))
    finally:
        client.close()
    return ""


def counts(prey: Prey) -> str:
    """Count by writes into the word that every peer may write to."""
    client = TcpClient(prey.target)
    try:
        for _ in range(BURST):
            client.send(client.count(prey.dice.getrandbits(64)))
            client.send(client.count(prey.dice.randrange(1 << 12)))
    finally:
        client.close()
    return ""


def writes_without_a_key(prey: Prey) -> str:
    """Write and read by keys that were guessed."""
    for op in (4, 2):
        client = TcpClient(prey.target)
        try:
            for _ in range(8):
                key = prey.dice.getrandbits(64)
                size = BASE.size + 24
                head = BASE.pack(VERSION, op, 0, 0, 1, size, 0, size + (64 if op == 4 else 0))
                client.send(head + struct.pack("<QQQ", 0, 64, key) + (os.urandom(64) if op == 4 else b""))
        except OSError:
            continue  # the target ended the connection
        finally:
            client.close()
    return ""


def comes_and_goes(prey: Prey) -> str:
    """Open connections and leave, again and again."""
    for _ in range(20):
        TcpClient(prey.target).close()
    return ""


def sends_empty_messages(prey: Prey) -> str:
    """Send messages of libfabric that are shorter than ours, or longer than any buffer."""
    for size in (0, 1, 15, 20000):
        client = TcpClient(prey.target)
        try:
            client.send(BASE.pack(VERSION, MESSAGE, 0, 0, 0, BASE.size, 0, BASE.size + size) + bytes(size))
        finally:
            client.close()
    return ""


def counts_by_messages(prey: Prey) -> str:
    """Send messages that claim an immediate for which their headers have no room."""
    return _claims_an_immediate(prey, MESSAGE)


def counts_by_writes(prey: Prey) -> str:
    """Send writes to nowhere that claim an immediate for which their headers have no room."""
    return _claims_an_immediate(prey, WRITE)


def _claims_an_immediate(prey: Prey, op: int) -> str:
    client = TcpClient(prey.target)
    try:
        client.send(client.introduction())
        for _ in range(BURST):
            client.send(BASE.pack(VERSION, op, CQ_DATA, 0, 0, BASE.size, 0, BASE.size))
    finally:
        client.close()
    return ""


def holds_hundreds(prey: Prey) -> str:
    """Open hundreds of connections, send nothing, and hold them."""
    for _ in range(50):
        _held.append(socket.create_connection(place_of(prey.target), 2.0))
    while len(_held) > 600:
        _held.pop(0).close()
    return ""


TCP: tuple[Attack, ...] = (
    stays_mute,
    stops_in_the_middle,
    asks_wrongly,
    introduces_hundreds,
    answers_fences,
    counts,
    writes_without_a_key,
    comes_and_goes,
    sends_empty_messages,
    counts_by_messages,
    holds_hundreds,
)

LIBRARY: tuple[Attack, ...] = (counts_by_writes,)
"""Attacks on libfabric itself, whose headers they reach before anything of ours does."""
