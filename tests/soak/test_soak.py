"""A short run of the soak, seeded: `soak.py` describes what it looks for, tests/README.md how to run it for long."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# A deadline beyond what a loaded machine takes: killed processes are noticed by their end, not by their silence.
SHORT = ("--parties", "3", "--seconds", "3", "--deadline", "30", "--troubles", "kill,aclose,cancel,raise")


@pytest.mark.parametrize(("rails", "more"), [("local", ()), ("local,tcp", ("--calm",))])
def test_every_byte_and_count_is_right(rails: str, more: tuple[str, ...]) -> None:
    program = Path(__file__).parent / "soak.py"
    run = subprocess.run(
        [sys.executable, str(program), "--rails", rails, *SHORT, *more], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    seen = json.loads(run.stdout)
    assert seen.get("lanes in calm", 0) + seen.get("lanes", 0) > 0, seen
    assert seen["transfers"] > 0, seen
