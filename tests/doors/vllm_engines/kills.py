"""Kills nodes of a vLLM cluster by -9 at random moments under load: right answers or clear errors, no block leaked.

    PYTHONPATH=build/doors/vllm-python/0.33.0 build/doors/venv/bin/python tests/doors/vllm_engines/kills.py

Two prefill and two decode nodes; a killed one starts again while others are killed. After each kill the clients' last
requests end, and every node that is up must have all its blocks. Prints a JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cluster import ARITHMETIC, Cluster, open_cluster, preload, texts_alone, until

PREFILL, DECODE = ["P1", "P2"], ["D1", "D2"]
PROMPTS = [[(7 * place + 13 * number) % 251 for place in range(40 + 60 * number)] for number in range(6)]
TOKENS = 24
LEASE_S = 3.0
"""Blocks of a request whose decode node died before it asked for them are free after this."""


@dataclass
class Load:
    """Clients that ask one request after the other, and what became of them.

    Attributes:
        right: whether a text is the answer to the prompt of this number.
        fields: what each request has beside its prompt.
    """

    cluster: Cluster
    prompts: list[list[int]]
    right: Callable[[int, str], bool]
    fields: dict[str, Any] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    stopped: bool = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Ask within the scope; at its end every request has an answer or an error."""
        self.stopped = False
        clients = [threading.Thread(target=self._client, args=(number,)) for number in range(len(self.prompts))]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            self.stopped = True
            for client in clients:
                client.join()

    def ask(self, number: int) -> None:
        """Ask for one answer."""
        try:
            text = self.cluster.ask(self.prompts[number], TOKENS, **self.fields)
        except AssertionError as error:  # an answer of another status than 200, which names a reason
            status = str(error)[:3]
            self.outcomes[f"error {status}"] += 1
            if status not in ("502", "503", "504"):
                self.wrong.append(f"prompt {number}: {str(error)[:300]}")
        except OSError as error:
            self.wrong.append(f"prompt {number}: the router broke off: {error!r}")
        else:
            self.outcomes["answers"] += 1
            if not self.right(number, text):
                self.wrong.append(f"prompt {number}: {text!r}")

    def _client(self, number: int) -> None:
        while not self.stopped:
            try:
                self.ask(number)
            except Exception as error:  # of this thread: the run fails by it
                self.wrong.append(f"prompt {number}: {error!r}")
                return


class Killing:
    """Nodes that are killed and start again."""

    def __init__(self, load: Load, seed: int) -> None:
        """Take the nodes with engines that are up."""
        self.load, self.cluster, self.dice = load, load.cluster, random.Random(seed)
        self.up = [node.name for node in self.cluster.nodes.values() if node.engine]
        self.starting: list[str] = []
        self.killed = Counter[str]()

    def kill(self) -> None:
        """Kill a node under load, start it again, and require that the rest have all their blocks."""
        with self.load.running():
            answered = self.load.outcomes["answers"]
            until(lambda: self.load.outcomes["answers"] > answered or bool(self.load.wrong))
            time.sleep(self.dice.uniform(0, 0.5))
            name = self.dice.choice(self.up)
            role = self.cluster.nodes[name].role
            self.cluster.nodes[name].kill()
            self.killed[role] += 1
            self.cluster.engine(role, name)
            self.up.remove(name)
            self.starting.append(name)
            self.take_back(role)
        self.require()
        print(f"{name} was killed, {dict(self.load.outcomes)}", file=sys.stderr, flush=True)

    def take_back(self, role: str) -> None:
        """Take those back that listen again; wait for one of a role that has none."""
        for name in list(self.starting):
            alone = all(self.cluster.nodes[other].role != role for other in self.up)
            if self.cluster.nodes[name].listens() or (alone and self.cluster.nodes[name].role == role):
                self.cluster.ready(name)
                self.starting.remove(name)
                self.up.append(name)

    def require(self) -> None:
        """Require right answers, and every block of the nodes that are up."""
        assert not self.load.wrong, self.load.wrong
        for name in self.up:
            self.cluster.nodes[name].emptied()

    def finish(self) -> None:
        """Wait for all nodes, and require the same of all, after another request of each client."""
        self.cluster.ready(*self.starting)
        self.up += self.starting
        self.starting = []
        for number in range(len(self.load.prompts)):
            self.load.ask(number)
        self.require()


def run(load: Load, kills: int, seed: int, limit_s: float = float("inf")) -> dict[str, Any]:
    """Kill so many nodes, or as many as fit; return what was seen.

    Raises AssertionError for a wrong answer or a leaked block.
    """
    begun, killing = time.monotonic(), Killing(load, seed)
    while sum(killing.killed.values()) < kills and time.monotonic() < begun + limit_s:
        killing.kill()
    killing.finish()
    seconds = round(time.monotonic() - begun)
    return {
        "seed": seed,
        "killed": dict(killing.killed),
        "outcomes": dict(load.outcomes),
        "leaked": 0,
        "seconds": seconds,
    }


def run_arithmetic(kills: int, seed: int) -> dict[str, Any]:
    """Kill nodes whose engines compute checksums of their blocks."""
    served = ARITHMETIC.with_lease(LEASE_S)
    with open_cluster(PREFILL, DECODE, step_s=0.01, served=served) as cluster:
        expected = texts_alone(PROMPTS, TOKENS)
        return run(Load(cluster, PROMPTS, lambda number, text: text == expected[number]), kills, seed)


def main() -> None:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    preload()
    print(json.dumps(run_arithmetic(chosen.kills, chosen.seed)))


if __name__ == "__main__":
    main()
