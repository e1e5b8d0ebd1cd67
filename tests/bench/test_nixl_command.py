"""Ring 7, as smoke: `bench nixl` compares every byte of writes and reads. Speed is not judged."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")


@pytest.mark.slow
def test_the_face_stands_beside_bare_calls() -> None:
    command = [
        sys.executable,
        "-m",
        "asyncfabric_services",
        "bench",
        "nixl",
        "--json",
        "--operation",
        "both",
        "--region",
        "4MiB",
        "--repeats",
        "1",
        "--count",
        "4",
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert {row["provider"] for row in rows} >= {"bare", "face"}
    assert {row["operation"] for row in rows} == {"write", "read"} and all(row["verified"] for row in rows)
    assert all(row["over_bare"] > 0 for row in rows if row["provider"] == "face")


def test_two_namespaces_are_named() -> None:
    command = [sys.executable, "-m", "asyncfabric_services", "bench", "nixl", "--namespaces", "one"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and "--namespaces" in run.stderr
