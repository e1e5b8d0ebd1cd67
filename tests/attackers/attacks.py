"""What a stranger without the secret tries on any rail. Each attack is short, and returns what it got and must not get.

`client` opens a connection of the rail under attack; what one rail alone can suffer is in `local_attacks` and
`tcp_attacks`. An attack that the target ends early, or that waits for it in vain, has got nothing.
"""

from __future__ import annotations

import os
import random
import secrets
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from engine_wire import CODE_BYTES, NONCE_BYTES, OUR_LIFE, Claimant, Kind, Message, Target

BURST = 200
PATIENCE_S = 0.3


class Client(Protocol):
    """A connection, as `TcpClient` and `LocalClient` are."""

    ours: Target

    def send_message(self, message: bytes) -> None:
        """Send one message of the engine."""

    def messages(self, patience_s: float) -> Iterator[Message]:
        """Yield what the target sends us."""

    def claim(self, secret: bytes, patience_s: float = 1.0) -> Claimant | None:
        """Become a peer; None where that is refused."""

    def close(self) -> None:
        """End it."""


@dataclass(frozen=True)
class Prey:
    """Whom an attack is on: `target`, who works with `other`. `dice` are seeded."""

    target: Target
    other: Target
    client: Callable[..., Any]
    dice: random.Random


Attack = Callable[[Prey], str]


def orders(sender: int, target: int, dice: random.Random) -> list[Message]:
    """Return messages that would change something, if their sender were a peer."""
    value, word = dice.randrange(8), struct.pack("<H", 5) + b"hello"
    kinds = [kind for kind in Kind if kind not in (Kind.HELLO, Kind.CHALLENGE, Kind.PROOF)]
    payloads = {Kind.USER: word, Kind.ASK_KEY: bytes(16), Kind.KEY_VERDICT: b"\0", Kind.CLOSED_ACK: b"\0\1"}
    found = [Message(kind, sender, target, value, dice.choice((0, 1, 2)), payloads.get(kind, b"")) for kind in kinds]
    dice.shuffle(found)
    return found


def sends_no_hello(prey: Prey) -> str:
    """Send orders as somebody unknown."""
    client = prey.client(prey.target)
    try:
        for message in orders(client.ours.incarnation, prey.target.incarnation, prey.dice):
            client.send_message(bytes(message))
    finally:
        client.close()
    return ""


def forges_the_sender(prey: Prey) -> str:
    """Send orders in the name of the peer that the target works with, its goodbye among them."""
    client = prey.client(prey.target)
    try:
        for message in orders(prey.other.incarnation, prey.target.incarnation, prey.dice):
            client.send_message(bytes(message))
            client.send_message(os.urandom(prey.dice.randrange(200)))
    finally:
        client.close()
    return ""


def claims_with(secret: bytes) -> Attack:
    """Return the attack that sends hello with this secret, which is none or a wrong one."""

    def claim(prey: Prey) -> str:
        client = prey.client(prey.target)
        try:
            return "it was welcome" if client.claim(secret, PATIENCE_S) else ""
        finally:
            client.close()

    claim.__name__ = "has_a_wrong_secret" if secret else "has_no_secret"
    return claim


def steals_an_identity(prey: Prey) -> str:
    """Send hello as the peer that the target works with, from an address of ours."""
    client = prey.client(prey.target)
    try:
        ours = replace(client.ours, incarnation=prey.other.incarnation)
        claimant = Claimant(ours, prey.target, secrets.token_bytes(32))
        client.send_message(claimant.hello())
        for message in client.messages(PATIENCE_S):
            if message.kind in (Kind.CHALLENGE, Kind.WELCOME):
                return f"it was answered by {Kind(message.kind).name}"
    finally:
        client.close()
    return ""


def invents_proofs(prey: Prey) -> str:
    """Send challenges and proofs that nobody asked for, in the name of ours and of the other."""
    client = prey.client(prey.target)
    try:
        for sender in (client.ours.incarnation, prey.other.incarnation):
            for kind in (Kind.CHALLENGE, Kind.PROOF):
                payload = os.urandom(2 * NONCE_BYTES + 8 + CODE_BYTES)
                client.send_message(bytes(Message(kind, sender, prey.target.incarnation, OUR_LIFE << 32, 1, payload)))
    finally:
        client.close()
    return ""


def floods_hellos(prey: Prey) -> str:
    """Send hello as hundreds, each with another identity, and never read an answer."""
    client = prey.client(prey.target)
    try:
        for number in range(BURST):
            ours = replace(client.ours, incarnation=prey.dice.getrandbits(63) | 1)
            wrong = secrets.token_bytes(32) if number % 2 else b""
            client.send_message(Claimant(ours, prey.target, wrong).hello())
    finally:
        client.close()
    return ""


def sends_nonsense(prey: Prey) -> str:
    """Send bytes that are hardly a message: cut hellos, huge lengths, unknown kinds."""
    client = prey.client(prey.target)
    try:
        hello = Claimant(client.ours, prey.target, secrets.token_bytes(32)).hello()
        for _ in range(BURST // 4):
            cut = bytearray(hello[: prey.dice.randrange(1, len(hello))])
            cut[prey.dice.randrange(len(cut))] ^= 1 << prey.dice.randrange(8)
            client.send_message(bytes(cut))
        client.send_message(bytes(Message(99, 1, 1)))
        client.send_message(b"")
    finally:
        client.close()
    return ""


COMMON: tuple[Attack, ...] = (
    sends_no_hello,
    forges_the_sender,
    claims_with(b""),
    claims_with(b"a secret that others have"),
    steals_an_identity,
    invents_proofs,
    floods_hellos,
    sends_nonsense,
)


def passes_on(trap: Client, prey: Prey) -> str:
    """Wait for a victim that was led to `trap`, and pass its hello on: back to it, and to the peer that it works with.

    Its code is for the address of the trap, so it opens nothing anywhere else.
    """
    for message in trap.messages(30.0):  # most of which the siege may keep us stopped
        if message.kind != Kind.HELLO:
            continue
        turned = replace(message, sender=message.target, target=message.sender)
        for to, copy in ((prey.target, message), (prey.other, message), (prey.target, turned)):
            client = prey.client(to)
            try:
                client.send_message(bytes(copy))
                for answer in client.messages(PATIENCE_S):
                    if answer.kind in (Kind.CHALLENGE, Kind.WELCOME):
                        return f"a hello that was passed on was answered by {Kind(answer.kind).name}"
            finally:
                client.close()
        return ""
    return "the victim never came: nothing was tried"
