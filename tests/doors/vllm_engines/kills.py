"""Kills nodes of a vLLM cluster by -9 at random moments under load: right answers or clear errors, no block leaked.

    PYTHONPATH=build/doors/vllm-python/0.33.0 build/doors/venv/bin/python tests/doors/vllm_engines/kills.py

Two prefill and two decode nodes; a killed one is started again before the next kill. Prints a JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from cluster import Cluster, open_cluster, preload, texts_alone, until

PREFILL, DECODE = ("P1", "P2"), ("D1", "D2")
PROMPTS = [[(7 * place + 13 * number) % 251 for place in range(40 + 60 * number)] for number in range(6)]
TOKENS = 24


@dataclass
class Load:
    """Clients that ask one request after the other, and what became of them."""

    cluster: Cluster
    expected: list[str]
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    stopped: bool = False

    def client(self, number: int) -> None:
        """Ask until the end."""
        while not self.stopped:
            try:
                text = self.cluster.ask(PROMPTS[number], TOKENS)
            except AssertionError as error:  # an answer of another status than 200, which names a reason
                status = str(error)[:3]
                self.outcomes[f"error {status}"] += 1
                if status not in ("502", "503", "504"):
                    self.wrong.append(f"prompt {number}: {str(error)[:300]}")
            except OSError as error:
                self.wrong.append(f"prompt {number}: the router broke off: {error!r}")
            else:
                self.outcomes["answers"] += 1
                if text != self.expected[number]:
                    self.wrong.append(f"prompt {number}: {text!r} instead of {self.expected[number]!r}")


def run(kills: int, seed: int) -> dict[str, Any]:
    """Kill so many nodes; return what was seen. Raises AssertionError for a wrong answer or a leaked block."""
    dice, killed, begun = random.Random(seed), Counter[str](), time.monotonic()
    with open_cluster(list(PREFILL), list(DECODE), step_s=0.01) as cluster:
        load = Load(cluster, texts_alone(PROMPTS, TOKENS))
        clients = [threading.Thread(target=load.client, args=(number,)) for number in range(len(PROMPTS))]
        for client in clients:
            client.start()
        try:
            for _ in range(kills):
                answered = load.outcomes["answers"]
                until(lambda answered=answered: load.outcomes["answers"] > answered or bool(load.wrong))
                time.sleep(dice.uniform(0, 0.5))
                name = dice.choice(PREFILL + DECODE)
                cluster.nodes[name].kill()
                killed["prefill" if name in PREFILL else "decode"] += 1
                cluster.engine("prefill" if name in PREFILL else "decode", name)
                cluster.ready(name)
                assert not load.wrong, load.wrong
        finally:
            load.stopped = True
            for client in clients:
                client.join()
        assert not load.wrong, load.wrong
        for name in PREFILL + DECODE:
            cluster.nodes[name].emptied()
    seconds = round(time.monotonic() - begun)
    return {"seed": seed, "killed": dict(killed), "outcomes": dict(load.outcomes), "leaked": 0, "seconds": seconds}


def main() -> None:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    preload()
    print(json.dumps(run(chosen.kills, chosen.seed)))


if __name__ == "__main__":
    main()
