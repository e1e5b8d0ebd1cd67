"""The same file under each launcher: the answers of one process, and full strength after kills, by its own restart.

Ray is tried where Ray is: tests/doors/test_ray_launcher.py.
"""

from __future__ import annotations

from pathlib import Path

import kills
import pytest
import slurm
import trio

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # openai's streams from a killed router
@pytest.mark.parametrize(("launcher", "killed"), [("local", 3), ("slurm", 2), ("torchrun", 1)])
def test_killed_nodes_come_back_and_no_answer_is_wrong(launcher: str, killed: int, short: Path) -> None:
    if launcher == "slurm" and (lacking := slurm.missing()):
        pytest.skip(f"THE CLUSTER WAS NOT STARTED BY SLURM: {lacking}")
    found = trio.run(kills.kill_nodes, launcher, killed, 2, 4, short)
    assert found["wrong_answers"] == 0, found
    assert found["kills"] == killed
    assert found["answers"] >= 2 * len(kills.ASKS)
