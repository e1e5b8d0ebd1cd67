"""Ring 7, as smoke: `bench nixl` compares every byte of writes and reads. Speed is not judged."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")

LITTLE = ("--json", "--region", "4MiB", "--repeats", "1", "--count", "4")
COMMAND = (sys.executable, "-P", "-m", "asyncfabric_services", "bench", "nixl")
KIB = 1024


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120)


def rows_of(run: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert all(row["verified"] for row in rows)
    return rows


@pytest.mark.slow
def test_the_face_stands_beside_bare_calls() -> None:
    rows = rows_of(bench(*LITTLE, "--operation", "both"))
    assert {row["provider"] for row in rows} >= {"bare", "face"}
    assert all(row["over_bare"] > 0 for row in rows if row["provider"] == "face")
    noted = {
        (row["rails"], row["operation"]) for row in rows if row["bytes"] == 4 * KIB and "answered" in row["figure"]
    }
    assert noted == {(rails, operation) for rails in ("local", "tcp:lo") for operation in ("read", "write")}


def namespaces_of_benches() -> set[str]:
    return {path.name for path in Path("/run/netns").glob("afbench*")}


@pytest.mark.slow
def test_the_ends_of_tcp_run_in_namespaces_that_are_made_and_removed() -> None:
    before = namespaces_of_benches()  # of runs that were killed, or that run beside this one
    run = bench(*LITTLE, "--rails", "tcp", "--namespaces", "new")
    if run.returncode == 3 and "cannot be made" in run.stderr + run.stdout:
        pytest.skip(f"network namespaces cannot be made here: {run.stderr}")
    rows = rows_of(run)
    assert {(row["rails"], row["namespaces"]) for row in rows} == {("tcp:fabric0", True)}
    assert namespaces_of_benches() <= before


@pytest.mark.slow
def test_namespaces_are_removed_after_sigterm() -> None:
    command = [*COMMAND, "--rails", "tcp", "--namespaces", "new", "--duration", "60s"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        mine = {f"afbench{run.pid}{end}" for end in "ab"}
        while run.poll() is None and not mine <= namespaces_of_benches():
            time.sleep(0.05)
        run.terminate()
        _, error = run.communicate(timeout=60)
    if run.returncode == 3 and "cannot be made" in error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    assert run.returncode == -signal.SIGTERM
    assert not mine & namespaces_of_benches()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--namespaces", "one"),
        ("--namespaces", "a,b,c"),
        ("--namespaces", "new", "--rails", "local"),
        ("--rails", "local", "--memory", "both"),
    ],
)
def test_what_does_not_fit_together_is_refused(arguments: tuple[str, ...]) -> None:
    run = bench(*arguments)
    assert (
        run.returncode == 2
        and f"Invalid value for {'--namespaces' if '--namespaces' in arguments else '--rails'}" in run.stderr
    )
