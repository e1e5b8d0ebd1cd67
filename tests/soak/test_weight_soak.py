"""A short run of the soak of weights, seeded: `weight_soak.py` describes what it looks for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="THE SOAK OF WEIGHTS WAS NOT RUN: torch is not installed")

pytestmark = pytest.mark.slow

# A bound beyond what a loaded machine takes: what is looked for here is torn versions and waits without an end.
SHORT = ("--rounds", "8", "--joins", "4", "--seed", "3", "--bound", "30")


@pytest.mark.timeout(300)
def test_versions_are_whole_and_nobody_waits_for_ever_whatever_is_killed() -> None:
    program = Path(__file__).parent / "weight_soak.py"
    run = subprocess.run([sys.executable, str(program), *SHORT], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-1500:]
    seen = json.loads(run.stdout)
    assert seen["joins"] == 4 and sum(seen["kills"].values()) == 8, seen
    assert {"engine", "trainer"} <= seen["kills"].keys(), seen
