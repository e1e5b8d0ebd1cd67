"""`asyncfabric demo moe` end to end: one of four expert nodes is killed, and every answer is one process's."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from availability import need_time_for_demos

for needed in ("torch", "transformers", "hypercorn"):
    pytest.importorskip(needed, reason=f"expert nodes need {needed}")

pytestmark = pytest.mark.slow
RUN = "from asyncfabric_services.cli import main; main()"
COMMAND = [sys.executable, "-P", "-c", RUN, "demo", "moe", "--layers", "2", "--hidden", "64", "--tokens", "16"]
PATIENCE = 200.0


def test_the_scenario_ends_well() -> None:
    need_time_for_demos()
    done = subprocess.run([*COMMAND, "--json"], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr + done.stdout
    reported = json.loads(done.stdout.splitlines()[-1])
    assert (reported["answers"], reported["wrong_answers"], reported["errors"]) == (8, 0, [])
    assert reported["left_out"] == [2]
    assert "rank 2 lost" in reported["because"]
    assert reported["noticed_seconds"] > 0
