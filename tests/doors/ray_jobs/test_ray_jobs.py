"""A cluster as a job of Ray: it answers as one process, and nothing is left of it when the job is stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_commands import NODES, PATIENCE, PROMPTS, Commands, expected_answers

from asyncfabric_services.launch.local import free_port
from children import Child

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "of-this-test-alone-0123456789"}  # Ray 2.60 takes no job without


class Jobs:
    """The command `ray job` at a dashboard."""

    def __init__(self, port: int) -> None:
        self._address = f"http://127.0.0.1:{port}"

    def run(self, word: str, *words: str) -> str:
        command = [sys.executable, "-m", "ray.scripts.scripts", "job", word, "--address", self._address, *words]
        done = subprocess.run(command, env=os.environ | TOKEN, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr


@pytest.fixture
def hosts() -> Iterator[tuple[Child, Jobs]]:
    """Run two raylets, and the dashboard."""
    port = free_port()
    with Child("ray_hosts.py", str(port), **TOKEN) as found:
        yield found, Jobs(port)
        found.end()


def test_a_cluster_is_a_job_that_can_be_stopped(
    hosts: tuple[Child, Jobs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raylets, jobs = hosts
    monkeypatch.setenv("RAY_AUTH_MODE", TOKEN["RAY_AUTH_MODE"])
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN["RAY_AUTH_TOKEN"])
    commands = Commands(tmp_path, raylets.ask("address")["address"])
    up = [sys.executable, "-P", "-m", "asyncfabric_services", "up", "cluster.toml", "--launcher", "ray"]
    own = ["--folder", str(tmp_path / "state")]
    jobs.run("submit", "--working-dir", str(tmp_path), "--submission-id", "chat", "--no-wait", "--", *up, *own)
    commands.whole(NODES, {})
    assert [commands.ask(prompt) for prompt in PROMPTS] == expected_answers()
    assert "'chat' was stopped" in jobs.run("stop", "chat")
    assert raylets.ask("left") == {"ok": True, "actors": [], "groups": []}
