"""Siege: two honest processes work together on one rail; beside them an attacker without their secret does its worst.

`SECONDS=600 python tests/attackers/siege.py --rail local`. The honest pair is beside the attacker, alone, and beside
a process that only takes a core, slice by slice in turns, so that all three meet the same load of the machine; tests
leave the third out. Ends with status 1 where a byte, a count or a message was wrong, something waited, a stranger
became a peer, or memory or descriptors grew.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROMISED = ("wrong_bytes", "wrong_counts", "strange_messages", "late")
"""What the honest count, and must not see."""
SLICE_S = 1.0
PATIENCE_S = 60.0
MOST_GROWTH_BYTES = 64 << 20
MOST_DESCRIPTORS = 400  # more than before, while the attacker holds some
SETTLE_S = 20.0
LEFT_DESCRIPTORS = 16  # more than before, once it is gone


class Hung(Exception):
    """A process did not answer."""


class Program:
    """A process of the siege that speaks in JSON lines."""

    def __init__(self, name: str, *arguments: str, python: str = sys.executable) -> None:
        self.name = name
        self.child = subprocess.Popen(
            [python, "-P", str(HERE / name), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONPATH": str(HERE)},
        )
        self.place: dict[str, str] = {}
        self._taken = b""

    def send(self, line: str) -> None:
        """Send a line."""
        assert self.child.stdin is not None
        self.child.stdin.write(line.encode() + b"\n")

    def receive(self, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """Return the next answer; raises Hung when none comes."""
        assert self.child.stdout is not None
        deadline = time.monotonic() + patience_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.child.stdout, selectors.EVENT_READ)
            while b"\n" not in self._taken:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise Hung(f"{self.name} {self.child.pid} did not answer within {patience_s:g} s")
                chunk = os.read(self.child.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise Hung(f"{self.name} ended with status {self.child.wait(PATIENCE_S)}")
                self._taken += chunk
        line, self._taken = self._taken.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, line: str, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """Send a line and return the answer."""
        self.send(line)
        return self.receive(patience_s)

    def end(self) -> None:
        """End it, however it is."""
        self.child.kill()
        self.child.wait()
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def honest_pair(rail: str) -> Iterator[list[Program]]:
    """Start two honest processes that work together; they end with the scope."""
    secret = secrets.token_hex(32)
    pair: list[Program] = []
    try:
        pair += [Program("honest.py", rail, secret, str(seed)) for seed in (0, 1)]
        for one in pair:
            one.place = one.receive()
        for one, other in (pair, reversed(pair)):
            one.send(json.dumps(other.place))
        yield pair
    finally:
        for one in pair:
            one.end()


def besiege(
    rail: str, seconds: float, seed: int, names: str = "", patience_s: float = PATIENCE_S, *, with_spinner: bool = False
) -> dict[str, Any]:
    """Run it and return the report; `names`: these attacks alone, joined by commas.

    Raises Hung when a process does not answer within `patience_s`.
    """
    with honest_pair(rail) as pair:
        addresses = [one.place["address"] for one in pair]
        attacker = Program("attacker.py", *addresses, str(seed), names)
        spinner = Program("spinner.py") if with_spinner else None
        beside = {"attacked": attacker, "alone": None}
        try:
            if spinner is not None:
                spinner.child.send_signal(signal.SIGSTOP)
                beside["beside_spinner"] = spinner
            trap = attacker.receive(2 * PATIENCE_S)["trap"]
            attacker.child.send_signal(signal.SIGSTOP)
            begun = time.monotonic()
            while min(one.ask("look")["rounds"] for one in pair) < 5:
                if time.monotonic() > begun + PATIENCE_S:
                    raise Hung("the honest pair did not begin")
                time.sleep(0.05)
            before = [one.ask("look") for one in pair]
            pair[0].send(f"lure {trap}")
            rounds, times = dict.fromkeys(beside, 0), dict.fromkeys(beside, 0.0)
            rows = [before]
            for turn, other in cycle(beside.items()):
                if sum(times.values()) >= seconds:
                    break
                if other is not None:
                    other.child.send_signal(signal.SIGCONT)
                began = time.monotonic()
                time.sleep(SLICE_S)
                rows.append([one.ask("look", patience_s) for one in pair])
                times[turn] += time.monotonic() - began
                rounds[turn] += sum(
                    now["rounds"] - then["rounds"] for now, then in zip(rows[-1], rows[-2], strict=True)
                )
                if other is not None:
                    other.child.send_signal(signal.SIGSTOP)
            attacker.child.send_signal(signal.SIGCONT)
            done = attacker.ask("end", 2 * PATIENCE_S)
            attacker.child.wait(PATIENCE_S)
        finally:
            for program in filter(None, (attacker, spinner)):
                program.end()
        after = settled(pair, before, patience_s)
        return report_of(rows, after, done, rounds, times)


def settled(pair: list[Program], before: list[dict[str, Any]], patience_s: float) -> list[dict[str, Any]]:
    """Return how the honest pair is once what strangers left has ended: 2 s, more on a loaded machine."""
    deadline = time.monotonic() + SETTLE_S
    time.sleep(3.0)
    while True:
        after = [one.ask("look", patience_s) for one in pair]
        left = [new["descriptors"] - old["descriptors"] for old, new in zip(before, after, strict=True)]
        if max(left) <= LEFT_DESCRIPTORS or time.monotonic() > deadline:
            return after
        time.sleep(0.5)


def report_of(
    rows: list[list[dict[str, Any]]],
    after: list[dict[str, Any]],
    done: dict[str, Any],
    rounds: dict[str, int],
    times: dict[str, float],
) -> dict[str, Any]:
    """Return what became of it, and `broken`: the promises that were not kept."""
    before = rows[0]
    rate = {turn: rounds[turn] / times[turn] for turn in times}
    sums = {name: sum(one[name] for one in after) for name in ("rounds", "registered", "lured", *PROMISED)}
    every = [one for row in rows for one in row]
    report = sums | {
        "attacks": done["attacks"],
        "refused_messages": sum(one["refused"] for one in after),
        "rounds_per_s": {turn: round(one, 1) for turn, one in rate.items()},
        "share": share(rate["attacked"], rate["alone"]),
        "share_of_beside_spinner": share(rate["attacked"], rate.get("beside_spinner", 0.0)),
        "most_descriptors": max(one["descriptors"] for one in every),
        "descriptors": [[old["descriptors"], new["descriptors"]] for old, new in zip(before, after, strict=True)],
        "grown_bytes": [new["resident_bytes"] - old["resident_bytes"] for old, new in zip(before, after, strict=True)],
    }
    broken = [f"{name}: {report[name]}" for name in PROMISED if report[name]]
    broken += [fault for one in after for fault in one["faults"]]
    broken += [f"a stranger is among the peers: {stranger}" for one in after for stranger in one["strangers"]]
    broken += [f"the attacker got something: {what}" for what in done["got"]]
    broken += [f"memory grew by {grown >> 20} MiB" for grown in report["grown_bytes"] if grown > MOST_GROWTH_BYTES]
    for old, new in report["descriptors"]:
        if new > old + LEFT_DESCRIPTORS:
            broken.append(f"{new - old} descriptors were left")
    if report["most_descriptors"] > max(one["descriptors"] for one in before) + MOST_DESCRIPTORS:
        broken.append(f"{report['most_descriptors']} descriptors were open at a time")
    stopped = [number for number, one in enumerate(after) if one["rounds"] == rows[-1][number]["rounds"]]
    broken += [f"honest process {number} made no round in the last 3 s" for number in stopped]
    return report | {"broken": broken}


def share(part: float, whole: float) -> float:
    """Return the quotient; 0 of nothing."""
    return round(part / whole, 3) if whole else 0.0


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rail", default="local")
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("SECONDS", "60")))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--attacks", default="", help="these alone, joined by commas")
    given = parser.parse_args()
    try:
        report = besiege(given.rail, given.seconds, given.seed, given.attacks, with_spinner=True)
    except Hung as error:
        report = {"broken": [f"hung: {error}"]}
    print(json.dumps(report, indent=1))
    return 1 if report["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
