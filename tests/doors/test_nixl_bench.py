"""`bench nixl` with all three contenders: the real NIXL, our face, our bare calls. Speed is not judged here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_three_contenders_do_the_same_work() -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "asyncfabric_services",
        "bench",
        "nixl",
        "--json",
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
    assert {row["provider"] for row in rows} == {"bare", "face", "nixl"} and all(row["verified"] for row in rows)
    assert all(row["ratio"] > 0 for row in rows if row["provider"] != "nixl")
