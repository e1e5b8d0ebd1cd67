"""`asyncfabric demo weights` end to end: a rollout is killed, another joins; every bit that served is right."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from availability import need_time_for_demos

for needed in ("torch", "transformers", "hypercorn", "safetensors"):
    pytest.importorskip(needed, reason=f"the demo needs {needed}")

pytestmark = pytest.mark.slow
RUN = "from asyncfabric_services.cli import main; main()"
COMMAND = [sys.executable, "-P", "-c", RUN, "demo", "weights", "--versions", "4"]
PATIENCE = 250.0


def test_every_version_that_served_is_right() -> None:
    need_time_for_demos()
    done = subprocess.run([*COMMAND, "--json"], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr + done.stdout
    reported = json.loads(done.stdout.splitlines()[-1])
    assert (reported["torn"], reported["wrong_bits"], reported["errors"]) == (0, 0, [])
    assert reported["versions"] >= 4
    assert reported["compared"] >= reported["versions"] / 2, "a survivor serves nearly all versions"
    assert reported["tokens"] > 0 and reported["update_bytes"] > 0 and reported["gbytes_per_s"] > 0
