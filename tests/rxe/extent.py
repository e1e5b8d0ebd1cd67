"""How much of ring 6 runs: what shows most for its time, or all, by `make rxe RXE_FLAGS=--all`.

ring.sh sets the variable; tests choose their cases with it when they are collected.
"""

from __future__ import annotations

import os
from typing import Any

ALL = os.environ.get("ASYNCFABRIC_TEST_RXE") == "all"


def cases(few: list[Any], more: list[Any]) -> list[Any]:
    """Return the cases of every run, and those of a whole one behind them."""
    return [*few, *more] if ALL else few
