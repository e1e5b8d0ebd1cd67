"""What a stranger tries on a `verbs` rail besides: at its queue pair for datagrams, and over those that it got."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace

from attacks import Attack, Prey
from verbs_client import COUNT, READ, SEND, WRITE, VerbsClient
from verbs_wire import BULK, SIGNALS, Datagram, Post

DATAGRAMS = 32
GUESSES = 3
HELD = 8
_held: list[VerbsClient] = []


def stays_mute(prey: Prey) -> str:
    """Get queue pairs and send nothing; the oldest leaves."""
    _held.append(VerbsClient(prey.target))
    while len(_held) > HELD:
        _held.pop(0).close()
    return ""


def forges_datagrams(prey: Prey) -> str:
    """Send answers and goodbyes that nobody waits for, about connections of others, and cut and changed ones."""
    client = VerbsClient(prey.target, connect=False)
    try:
        for _ in range(DATAGRAMS):
            kind = prey.dice.choice([kind for kind in Post if kind != Post.REQUEST])
            number = prey.dice.choice((0, 1, prey.dice.getrandbits(64)))
            ends = ((prey.dice.getrandbits(24), 1), (prey.dice.getrandbits(24), 1))
            whole = Datagram(kind, client.box.incarnation, number, client.us, prey.dice.randrange(4), ends=ends)
            client.post(bytes(replace(whole, key=prey.dice.getrandbits(64), number=prey.dice.getrandbits(32))))
            cut = bytearray(bytes(whole)[: prey.dice.randrange(1, len(bytes(whole)))])
            cut[prey.dice.randrange(len(cut))] ^= 1 << prey.dice.randrange(8)
            client.post(bytes(cut))
            client.post(os.urandom(prey.dice.randrange(1, 500)))
    finally:
        client.close()
    return ""


def repeats_requests(prey: Prey) -> str:
    """Ask for the same connection again and again: as it was, as an earlier attempt, and as later ones."""
    client = VerbsClient(prey.target)
    try:
        ends = tuple(pair.end for pair in client.pairs)
        for attempt in (1, 1, 0, 2, 3, 2, 1, (1 << 32) - 1, 4):
            client.post(bytes(client.request(client.connection, ends, attempt)))
    finally:
        client.close()
    return ""


def takes_places(prey: Prey) -> str:
    """Ask for connections that nobody will use, and send goodbyes for them; there is no queue pair at this end."""
    client = VerbsClient(prey.target, connect=False)
    try:
        numbers = [secrets.randbits(64) for _ in range(DATAGRAMS)]
        for number in numbers:
            client.post(bytes(client.request(number, ((0xFFFFF0, 1), (0xFFFFF1, 1)))))
        for number in numbers:
            client.post(bytes(Datagram(Post.BYE, client.box.incarnation, number, client.us)))
    finally:
        client.close()
    return ""


def counts(prey: Prey) -> str:
    """Count over both lanes, without a hello."""
    client = VerbsClient(prey.target)
    try:
        for _ in range(8):
            for lane in (BULK, SIGNALS):
                client.count(prey.dice.getrandbits(32), lane)
                client.count(prey.dice.randrange(1 << 12), lane)
        for pair in client.pairs:
            pair.outcome(1.0)
    finally:
        client.close()
    return ""


def guesses_keys(prey: Prey) -> str:
    """Write and read by numbers that were guessed; each miss breaks the queue pair, so a new one comes."""
    client = VerbsClient(prey.target)
    try:
        for guess in range(GUESSES):
            work = READ if guess % 2 else WRITE
            client.pairs[BULK].post(work, bytes(64), at=prey.dice.getrandbits(47), key=prey.dice.getrandbits(32))
            if client.pairs[BULK].outcome():
                return f"key {guess} opened memory"
            client.connect(guess + 2)
    finally:
        client.close()
    return ""


def sends_more_than_it_may(prey: Prey) -> str:
    """Send beyond the credits, and messages that are empty or longer than any buffer."""
    client = VerbsClient(prey.target)
    try:
        for length in (0, 1, 31, 33, 4000, 16000):
            for _ in range(4):
                client.pairs[SIGNALS].post(SEND, os.urandom(length))
        client.pairs[BULK].post(SEND, b"a message where counts are")
        client.pairs[BULK].post(COUNT, bytes(8), imm=7, at=0, key=0)
        for pair in client.pairs:
            pair.outcome(1.0)
    finally:
        client.close()
    return ""


def comes_and_goes(prey: Prey) -> str:
    """Open connections and leave, again and again."""
    for _ in range(4):
        VerbsClient(prey.target).close()
    return ""


VERBS: tuple[Attack, ...] = (
    stays_mute,
    forges_datagrams,
    repeats_requests,
    takes_places,
    counts,
    guesses_keys,
    sends_more_than_it_may,
    comes_and_goes,
)


def takes_all_places(prey: Prey) -> str:
    """Ask for as many connections as there are places, and keep them."""
    client = VerbsClient(prey.target, connect=False)
    try:
        for _ in range(DATAGRAMS):
            client.post(bytes(client.request(secrets.randbits(64), ((0xFFFFF0, 1), (0xFFFFF1, 1)))))
    finally:
        client.close()
    return ""


PLACES: tuple[Attack, ...] = (takes_all_places,)
"""Attacks on the places that a rail has for peers: the exchange of queue pairs is not part of the proof."""
