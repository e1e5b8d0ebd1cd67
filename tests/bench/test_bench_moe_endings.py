"""How `bench moe` ends when one of its ranks dies: soon, with an error that names it. Real processes, host memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")

PATIENCE_S = 15.0


def peers_of(pid: int) -> list[int]:
    """Return the measured processes of a command."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in children if b"bench.peer" in Path(f"/proc/{each}/cmdline").read_bytes()]


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_command() -> None:
    command = [
        sys.executable,
        "-m",
        "asyncfabric_services",
        "bench",
        "moe",
        "--json",
        "--processes",
        "2",
        "--tokens",
        "16",
        "--hidden",
        "128",
        "--top-k",
        "3",
        "--experts",
        "5",
        "--repeats",
        "1000",
        "--duration",
        "2s",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as run:
        try:
            deadline = time.monotonic() + 60
            while len(found := peers_of(run.pid)) < 2 or not all(map(has_engine, found)):
                assert time.monotonic() < deadline and run.poll() is None
                time.sleep(0.05)
            os.kill(found[1], signal.SIGKILL)
            begin = time.monotonic()
            _, errors = run.communicate(timeout=PATIENCE_S * 4)
        finally:
            run.kill()
    assert run.returncode != 0 and "rank 1" in errors, errors
    assert time.monotonic() - begin < PATIENCE_S
    assert not any(Path(f"/proc/{each}").exists() for each in found)


def has_engine(pid: int) -> bool:
    """State whether a process has opened its fabric."""
    try:
        return "asyncfabric" in Path(f"/proc/{pid}/maps").read_text() and len(os.listdir(f"/proc/{pid}/task")) > 2
    except (FileNotFoundError, PermissionError):
        return False
