"""What trust costs: the same work by a pair with a secret, by one without, and by those of another tree, in turns.

`python tests/attackers/costs.py [--rail local] [--turns 7] [--tree DIR]`; DIR has a `.venv` with its package. Prints
the median of the turns' lower quartiles in microseconds, and that of their ratios to the pair without a secret.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from siege import Program

KEYS = 24
FIGURES = {
    "4 KiB awaited": "page",
    "1 MiB windows, each MiB": "window",
    "64 B message": "message",
    "key of a region": "keys",
    "first write with a key": "first",
    "connect": "reconnect",
}


class Couple:
    """Two processes that work together; the first is measured."""

    def __init__(self, scope: ExitStack, rail: str, secret: str, python: str) -> None:
        self.ends = [Program("figures.py", rail, secret, python=python) for _ in range(2)]
        for end in self.ends:
            scope.callback(end.end)
        self.keys: dict[str, Any] = {}
        for end in self.ends:
            end.place = end.receive()
        for end, other in (self.ends, self.ends[::-1]):
            order(end, "meet", **other.place)

    def take(self, figure: str) -> float:
        """Return the lower quartile of one figure: what others on the machine cost makes most of them longer."""
        near, far = self.ends
        match figure:
            case "keys":
                self.keys = order(far, "keys", count=KEYS)
                took = self.keys["took"]
            case "first":
                took = order(near, "first", keys=self.keys["keys"])["took"]
            case _:
                took = order(near, figure)["took"]
        return statistics.quantiles(took, n=4)[0]


def order(one: Program, do: str, **arguments: Any) -> dict[str, Any]:
    """Order something and return the answer."""
    return one.ask(json.dumps({"do": do} | arguments))


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rail", default="local")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--tree", type=Path)
    given = parser.parse_args()
    secret = secrets.token_hex(32)
    with ExitStack() as scope:
        couples = {"without": Couple(scope, given.rail, "", sys.executable)}
        couples["secret"] = Couple(scope, given.rail, secret, sys.executable)
        if given.tree is not None:
            python = str(given.tree / ".venv/bin/python")
            couples["tree"] = Couple(scope, given.rail, secret, python)
        rows_of: dict[str, list[dict[str, float]]] = defaultdict(list)
        for number in range(given.turns + 1):
            for name in couples:
                rows_of[name].append({})
            for figure, what in FIGURES.items():
                for name in list(couples)[:: 1 if number % 2 else -1]:
                    rows_of[name][-1][figure] = couples[name].take(what)
    print(f"{given.rail:24}" + "".join(f"{name:>12}{'ratio':>8}" for name in rows_of))
    turns = {name: rows[1:] for name, rows in rows_of.items()}  # the first warmed up
    for figure in FIGURES:
        cells = []
        for rows in turns.values():
            ratios = [row[figure] / base[figure] for row, base in zip(rows, turns["without"], strict=True)]
            cells.append(f"{statistics.median(row[figure] for row in rows):12.1f}{statistics.median(ratios):8.3f}")
        print(f"{figure:24}" + "".join(cells))


if __name__ == "__main__":
    main()
