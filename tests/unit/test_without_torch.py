"""An installation without extras: what needs no torch works, what does states what to install, in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
sys.modules["torch"] = None  # as if it were not installed: importing it raises ModuleNotFoundError
from asyncfabric_services.cli import main
main(sys.argv[1:])
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.slow
def test_updates_of_weights_are_planned_and_predicted() -> None:
    done = run("plan", "weights", "--model", "tiny", "--train", "4", "--infer", "4", "--json")
    assert done.returncode == 0, done.stderr
    assert "predicted_seconds" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("plan", "moe"), ("bench", "moe"), ("bench", "coding")], ids=" ".join)
def test_what_needs_torch_reports_it(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert "torch" in done.stderr and "pip install" in done.stderr and len(done.stderr.splitlines()) == 1
