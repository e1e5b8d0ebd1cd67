"""The same file under each launcher: the answers of one process, and full strength after kills, by its own restart."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import kills
import pytest
import slurm
import trio

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # openai's streams from a killed router
@pytest.mark.parametrize(("launcher", "killed"), [("local", 3), ("ray", 2), ("slurm", 2), ("torchrun", 1)])
def test_killed_nodes_come_back_and_no_answer_is_wrong(launcher: str, killed: int, short: Path) -> None:
    if launcher == "slurm" and (lacking := slurm.missing()):
        pytest.skip(f"THE CLUSTER WAS NOT STARTED BY SLURM: {lacking}")
    if launcher == "ray" and importlib.util.find_spec("ray") is None:
        pytest.skip("THE CLUSTER WAS NOT STARTED BY RAY: it is not installed; `make doors` has it")
    if launcher == "ray":
        found = _alone(launcher, killed)  # Ray keeps threads until its process ends
    else:
        found = trio.run(kills.kill_nodes, launcher, killed, 2, 4, short)
    assert found["wrong_answers"] == 0, found
    assert found["kills"] == killed
    assert found["answers"] >= 2 * len(kills.ASKS)


def _alone(launcher: str, killed: int) -> dict[str, Any]:
    """Run the program in a process of its own."""
    options = ["--launcher", launcher, "--kills", str(killed), "--together", "2", "--json"]
    done = subprocess.run([sys.executable, "-P", kills.__file__, *options], stdout=subprocess.PIPE, text=True)
    assert done.stdout, f"the program ended with {done.returncode}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found
