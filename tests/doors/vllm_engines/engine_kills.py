"""Kills engines by -9 at random moments while they prefill, load and decode: right text, and every block comes back.

    PYTHONPATH=build/doors/vllm-python/0.33.0 build/doors/venv/bin/python tests/doors/vllm_engines/engine_kills.py

One engine prefills and one decodes, over vLLM's stock NixlConnector on our face, or over our connector. The killed one
is replaced; the other one goes on. Prints a JSON object. `kills.py` kills whole nodes behind a router.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from typing import Any

from cluster import preload

from nodes import ASK, OURS, PULL, PUSH, Node, prompt

LENGTHS, TOKENS, LEASE_S, MOMENTS_S = (40, 300, 700, 120), 4, 2, 0.2
KILLED = {PULL: ("P", "D"), PUSH: ("D",), OURS: ("P", "D")}
"""Who may be killed: where vLLM pushes, decode waits for ever for a prefill engine that died before it had pushed."""


class KillsOfEngines:
    """Two engines, of which one is killed and replaced in each round."""

    def __init__(self, connector: str, seed: int, **environment: str) -> None:
        """Start both, and have the texts that are right."""
        self._connector, self._dice, self._environment = connector, random.Random(seed), environment
        self._started = 0
        self.up: dict[str, Node] = {}
        self.killed, self.answers = Counter[str](), 0
        for role in ("P", "D"):
            self._start(role)
        self._prompts = [prompt(length, number) for number, length in enumerate(LENGTHS)]
        self._right = [self.up["P"].alone(tokens, TOKENS) for tokens in self._prompts]

    def kill(self) -> None:
        """Kill one of them within requests of four clients; require what the other one owes them."""
        role = self._dice.choice(KILLED[self._connector])
        prefilled = self._dice.random() < 0.7
        first, second = self.up["P"], self.up["D"]
        names = [f"{self._started}.{number}" for number in range(len(LENGTHS))]
        params: list[dict[str, Any]] = []
        for name, tokens in zip(names, self._prompts, strict=True):
            if prefilled:
                params.append(first.prefill(name, tokens))
            else:
                first.post("add", name, tokens, 1, dict(ASK))
        for name, tokens, each in zip(names, self._prompts, params, strict=False):
            second.post("add", name, tokens, TOKENS, each)
        time.sleep(self._dice.uniform(0, MOMENTS_S))
        self.up.pop(role).kill()
        self.killed[role] += 1
        if role == "P" and prefilled:
            second.answers(len(names))
            self._require([second.result(name)["tokens"] for name in names])
        elif role == "D" and not prefilled:
            first.answers(len(names))
            for name in names:
                first.result(name)
        self.up["D" if role == "P" else "P"].emptied()
        self._start(role)
        self.serve()

    def serve(self) -> None:
        """Have both answer all prompts, whose blocks come back."""
        first, second = self.up["P"], self.up["D"]
        names = [f"{self._started}.{number} after" for number in range(len(LENGTHS))]
        for name, tokens in zip(names, self._prompts, strict=True):
            second.add(name, tokens, TOKENS, first.prefill(name, tokens))
        self._require([second.result(name)["tokens"] for name in names])
        first.emptied(), second.emptied()

    def close(self) -> None:
        """End both."""
        for node in self.up.values():
            node.__exit__(None, None, None)

    def _require(self, found: list[list[int]]) -> None:
        assert found == self._right, (found, self._right)
        self.answers += len(found)

    def _start(self, role: str) -> None:
        self._started += 1
        name = f"{role}{self._started}"
        self.up[role] = Node(name, self._connector, blocks=128, lease_s=LEASE_S, **self._environment).ready()


def run_kills(connector: str, kills: int, seed: int, **environment: str) -> dict[str, Any]:
    """Kill so many engines; return what was seen.

    Raises AssertionError for a wrong answer, a leaked block, or an engine that is silent.
    """
    begun, engines = time.monotonic(), KillsOfEngines(connector, seed, **environment)
    try:
        while sum(engines.killed.values()) < kills:
            engines.kill()
            print(f"{dict(engines.killed)}, {engines.answers} answers", file=sys.stderr, flush=True)
    except BaseException:
        for node in engines.up.values():
            node.kill()
        raise
    engines.close()
    return {
        "connector": connector,
        "seed": seed,
        "killed": dict(engines.killed),
        "answers": engines.answers,
        "leaked": 0,
        "seconds": round(time.monotonic() - begun),
    }


def main() -> None:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connector", choices=list(KILLED), default=PULL)
    parser.add_argument("--rails", default="auto")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    preload()
    rails = {"ASYNCFABRIC_NIXL_RAILS": chosen.rails, "ASYNCFABRIC_RAILS": chosen.rails}
    print(json.dumps(run_kills(chosen.connector, chosen.kills, chosen.seed, **rails)))


if __name__ == "__main__":
    main()
