"""`asyncfabric demo kv` end to end: a cluster grows, loses a node and shrinks under load, and every answer is right."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from availability import need_time_for_demos

for needed in ("torch", "transformers", "openai", "hypercorn"):
    pytest.importorskip(needed, reason=f"the cluster needs {needed}")

pytestmark = pytest.mark.slow
RUN = "from asyncfabric_services.cli import main; main()"
COMMAND = [sys.executable, "-P", "-c", RUN, "demo", "kv", "--layers", "2", "--hidden", "32", "--tokens", "24"]
PATIENCE = 200.0


def test_the_scenario_ends_well() -> None:
    need_time_for_demos()
    done = subprocess.run([*COMMAND, "--requests", "24", "--json"], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr + done.stdout
    reported = json.loads(done.stdout.splitlines()[-1])
    assert reported["requests"] >= 24
    assert (reported["wrong_answers"], reported["lost"], reported["leaked_pages"], reported["errors"]) == (0, 0, 0, [])
    assert reported["retries"] >= 1, "a killed node is felt"
    assert 0 < reported["ttft_p50_ms"] <= reported["ttft_p99_ms"]
    assert reported["gbytes_per_s"] > 0
    assert 0 < reported["hidden_share"] <= 1


def nodes_of(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def test_an_interrupted_demo_leaves_no_process() -> None:
    demo = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert demo.stdout is not None
        assert "are ready" in demo.stdout.readline()
        nodes = nodes_of(demo.pid)
        assert len(nodes) >= 5
        demo.send_signal(signal.SIGINT)
        _, err = demo.communicate(timeout=PATIENCE)
        assert demo.returncode == 128 + signal.SIGINT
        assert err.splitlines()[-1] == "interrupted by SIGINT"
        assert [pid for pid in nodes if os.path.exists(f"/proc/{pid}")] == []
    finally:
        demo.kill()
        demo.communicate()
