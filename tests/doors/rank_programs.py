"""Runs a program once for each rank and returns the JSON that each printed; none is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PATIENCE_S = 280.0


def run_ranks(program: Path, ranks: int, meeting: Path) -> list[list[dict[str, Any]]]:
    """Start `program RANK RANKS MEETING` for all ranks and return their lines that are JSON; fails where one fails."""
    found = [
        subprocess.Popen(
            [sys.executable, "-P", str(program), str(rank), str(ranks), str(meeting)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        printed = [rank.communicate(timeout=PATIENCE_S)[0] for rank in found]
    finally:
        for rank in found:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in found] == [0] * ranks
    return [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in printed]
