"""`ray job submit -- asyncfabric up`: the job holds a cluster until it is stopped, and leaves nothing.

Directory and router only, which load no model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from children import Child

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PATIENCE = 600.0
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # as the head has it
JOB = "chat-job"
OURS = [sys.executable, "-P", "-m", "asyncfabric_services"]
CLUSTER = """
name = "chat"
[settings]
cluster.rails = "local"
http.port = 0
[nodes.directory]
[nodes.router]
"""


@pytest.fixture
def head() -> Iterator[Child]:
    """Run the head of a Ray; it leaves no process and no folder."""
    with Child("ray_head.py") as found:
        yield found
        found.end()
    assert not os.path.exists(found.hello["folder"])


def test_a_job_holds_a_cluster_until_it_is_stopped(head: Child, tmp_path: Path) -> None:
    (tmp_path / "sent").mkdir()
    (tmp_path / "sent" / "cluster.toml").write_text(CLUSTER)
    dashboard, folder = head.ask("address")["address"], ["--folder", str(tmp_path / "state")]

    def run(*command: str, fine: bool = True) -> str:
        done = subprocess.run(command, env={**os.environ, **LOOPBACK}, capture_output=True, text=True, timeout=PATIENCE)
        assert not fine or done.returncode == 0, f"{command}: {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def ray(*words: str) -> None:
        run(str(Path(sys.executable).parent / "ray"), "job", words[0], "--address", dashboard, *words[1:])

    def job(part: str = "") -> dict[str, str]:
        """Return what the dashboard knows of the job; the command of Ray would take seconds for each look."""
        with urllib.request.urlopen(f"{dashboard}/api/jobs/{JOB}{part}", timeout=PATIENCE) as answer:
            found: dict[str, str] = json.load(answer)
            return found

    up = [*OURS, "up", "cluster.toml", "--launcher", "ray", *folder]
    ray("submit", "--no-wait", "--submission-id", JOB, "--working-dir", str(tmp_path / "sent"), "--", *up)
    deadline = time.monotonic() + PATIENCE
    while "2 nodes ready" not in (log := job("/logs")["logs"]):
        assert job()["status"] in ("PENDING", "RUNNING") and time.monotonic() < deadline, log
        time.sleep(0.3)
    rows = [json.loads(line) for line in run(*OURS, "status", "--json", *folder).splitlines()]
    assert {row["name"]: row["state"] for row in rows} == {"directory-0": "ready", "router-0": "ready"}
    ray("stop", JOB)
    assert job()["status"] == "STOPPED"
    assert "chat: its nodes drain and end" in job("/logs")["logs"]
    assert head.ask("left") == {"ok": True, "actors": [], "groups": []}
    assert "no cluster runs from" in run(*OURS, "status", *folder, fine=False)
