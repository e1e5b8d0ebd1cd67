"""The attacker's process: one attack after the other until its input ends, chosen by seeded dice.

Begun by `siege.py` with the addresses of two honest fabrics. It prints the address of its trap first, and at its end
how often it did what, and what it got that it must not get.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
from collections import Counter
from functools import partial
from typing import Any

from attacks import COMMON, Attack, Prey, passes_on
from engine_wire import Target
from local_attacks import LOCAL
from local_client import LocalClient
from tcp_attacks import LIBRARY, TCP
from tcp_client import TcpClient
from verbs_attacks import PLACES, VERBS
from verbs_client import VerbsClient

CLIENTS: dict[str, Any] = {"local": LocalClient, "tcp": TcpClient, "verbs": VerbsClient}
ONLY_NAMED: dict[str, tuple[Attack, ...]] = {"local": (), "tcp": LIBRARY, "verbs": PLACES}
OWN: dict[str, tuple[Attack, ...]] = {"local": LOCAL, "tcp": TCP, "verbs": VERBS}


def attacks_of(protocol: str, *, named: bool = False) -> dict[str, Attack]:
    """Return the attacks on a rail by name; `named`: those too that are tried only where they are named."""
    chosen = (*COMMON, *OWN[protocol], *(ONLY_NAMED[protocol] if named else ()))
    return {attack.__name__: attack for attack in chosen}


def attempt(attack: Attack, prey: Prey) -> str:
    """Run an attack; return what it got."""
    try:
        return attack(prey)
    except (OSError, AssertionError):  # the target ended the connection, or never answered
        return ""


def main(first: str, second: str, seed: int, names: str) -> None:
    """Attack both in turn."""
    honest = [Target.parse(bytes.fromhex(text)) for text in (first, second)]
    protocol = honest[0].protocol.decode()
    attacks = attacks_of(protocol, named=True)
    chosen = [attacks[name] for name in names.split(",")] if names else list(attacks_of(protocol).values())
    dice, client = random.Random(seed), CLIENTS[protocol]
    trap = client(honest[0])
    print(json.dumps({"trap": trap.ours.public_bytes.hex()}), flush=True)
    os.nice(19)  # the test is of what attacks do to honest processes, not of who gets the cores
    done: Counter[str] = Counter()
    got: list[str] = []
    turns = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        target, other = honest if turns % 2 == 0 else honest[::-1]
        prey = Prey(target, other, client, dice)
        attack = partial(passes_on, trap) if turns == 0 else chosen[(turns - 1) % len(chosen)]
        turns += 1
        name = getattr(attack, "__name__", "passes_on")
        result = attempt(attack, prey)
        done[name] += 1
        if result:
            got.append(f"{name}: {result}")
        if turns % len(chosen) == 0:
            dice.shuffle(chosen)
    print(json.dumps({"attacks": dict(done), "got": got[:10]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
