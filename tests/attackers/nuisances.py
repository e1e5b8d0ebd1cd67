"""What others cost who has nothing to do with them: registering, releasing, statistics and writes beside strangers.

`python tests/attackers/nuisances.py [--rail local] [--turns 7] [--beside NAME] [--open]`. In each turn the same work is
timed in quiet, and beside a stranger that connected and stays mute, a peer that is stopped, 1,000 hellos that are never
finished over one connection, and 200 over one each. Prints medians in microseconds, the median of the ratios to quiet,
turn by turn, and the longest of all; behind that, how many releases ended in quarantine.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

from attacker import CLIENTS
from costs import Couple, order
from engine_wire import Claimant, Target
from siege import Program
from tcp_client import TcpClient

ROUNDS = 20
HELLOS, CROWD = 1000, 200
BOUND = 1.5


def hold(mode: str, address: str, secret: str) -> None:
    """Be the stranger until killed; prints a line once it is one."""
    os.nice(10)  # what it does is measured, not who gets the cores
    target, dice = Target.parse(bytes.fromhex(address)), random.Random(1)
    clients = [CLIENTS[target.protocol.decode()](target) for _ in range(CROWD if mode == "crowd" else 1)]
    for client in clients:
        if isinstance(client, TcpClient):
            client.send(client.introduction())
    while True:
        for client in clients * {"mute": 0, "hellos": HELLOS, "crowd": 1}[mode]:
            ours = replace(client.ours, incarnation=dice.getrandbits(63) | 1)
            with suppress(OSError):  # the target takes no more, or ended the connection
                client.send_message(Claimant(ours, target, bytes.fromhex(secret)).hello())
        print("{}", flush=True)
        time.sleep(1.0)


@contextmanager
def stranger(mode: str, address: str, secret: str) -> Iterator[None]:
    """Run one beside what is within."""
    one = Program("nuisances.py", "--hold", mode, address, secret)
    try:
        one.receive(150)
        yield
    finally:
        one.end()


@contextmanager
def stopped(one: Program) -> Iterator[None]:
    """Stop a peer beside what is within."""
    one.child.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        one.child.send_signal(signal.SIGCONT)


def measure(
    rail: str, turns: int, secret: str, names: tuple[str, ...] = (), rounds: int = ROUNDS
) -> dict[str, list[dict[str, list[float]]]]:
    """Return what was timed in quiet and beside each nuisance, or beside those of `names`, turn by turn."""
    with ExitStack() as scope:
        couple = Couple(scope, rail, secret, sys.executable)
        victim = couple.ends[0]
        peer = Program("figures.py", rail, secret)
        scope.callback(peer.end)
        peer.place = peer.receive()
        order(peer, "meet", **victim.place)
        address = victim.place["address"]
        nuisances: dict[str, Callable[[], Any]] = {
            "quiet": ExitStack,
            "mute stranger": lambda: stranger("mute", address, secret),
            "stopped peer": lambda: stopped(peer),
            # With the secret each is answered and waited for, and never finished; without it each is refused.
            "1,000 half-open hellos": lambda: stranger("hellos", address, secret),
            "200 half-open connections": lambda: stranger("crowd", address, secret),
            "1,000 wrong hellos": lambda: stranger("hellos", address, secrets.token_hex(32)),
        }
        chosen = ("quiet", *names) if names else tuple(nuisances)
        found: dict[str, list[dict[str, list[float]]]] = {name: [] for name in chosen}
        order(victim, "upkeep", rounds=rounds)
        for _ in range(turns):
            for name in chosen:
                with nuisances[name]():
                    found[name].append(order(victim, "upkeep", rounds=rounds))
        return found


def main() -> int:
    """Run from the command line; 1 where something was slower than it may be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rail", default="local")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--beside", action="append", default=[], help="this alone, and quiet; may be repeated")
    parser.add_argument("--open", action="store_true", help="fabrics without a secret")
    parser.add_argument("--hold", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.hold:
        hold(*given.hold)
    found = measure(given.rail, given.turns, "" if given.open else secrets.token_hex(32), tuple(given.beside))
    names = [name for name in found["quiet"][0] if name != "quarantined"]
    print(f"{given.rail:24}" + "".join(f"{name:>12}{'ratio':>7}{'most':>9}" for name in names))
    slow = 0
    for nuisance, rows in found.items():
        cells = []
        for name in names:
            middles = [statistics.median(row[name]) for row in rows]
            quiet = [statistics.median(row[name]) for row in found["quiet"]]
            ratio = statistics.median(here / there for here, there in zip(middles, quiet, strict=True))
            slow += ratio > BOUND
            most = max(max(row[name]) for row in rows)
            cells.append(f"{statistics.median(middles):12.1f}{ratio:7.2f}{most:9.0f}")
        lost = sum(len(row["quarantined"]) for row in rows)
        slow += lost
        print(f"{nuisance:24}" + "".join(cells) + f"{lost:5}")
    return min(slow, 1)


if __name__ == "__main__":
    sys.exit(main())
