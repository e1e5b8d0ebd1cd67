"""`asyncfabric demo rl` end to end: the curve goes up, and every version has the bits of its checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

for needed in ("torch", "transformers", "safetensors"):
    pytest.importorskip(needed, reason=f"the demo needs {needed}")

pytestmark = pytest.mark.slow
RUN = "from asyncfabric_services.cli import main; main()"
COMMAND = [sys.executable, "-P", "-c", RUN, "demo", "rl", "--versions", "8", "--json"]
PATIENCE = 250.0


@pytest.mark.timeout(300)
def test_the_curve_goes_up_and_every_version_is_right() -> None:
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
    reported = json.loads(done.stdout.splitlines()[-1])
    assert (reported["versions"], reported["compared"], reported["wrong_bits"]) == (8, 8, 0)
    assert len(reported["rewards"]) == 8 and reported["gain"] >= 0.2
