"""Ring 7, as smoke: `bench weights` with a small model between real processes, verified. Speed is not judged."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")


@pytest.mark.slow
def test_updates_are_whole_and_compared_with_copies() -> None:
    command = [
        sys.executable,
        "-m",
        "asyncfabric_services",
        "bench",
        "weights",
        "--json",
        "--rollouts",
        "2",
        "--model",
        "1MiB",
        "--side",
        "256",
        "--repeats",
        "1",
        "--scratch",
        "64MiB",
        "--form",
        "fp8",
        "--coding",
        "delta",
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    write, update = [json.loads(line) for line in run.stdout.splitlines()]
    assert (write["figure"], update["figure"]) == ("write", "update")
    for row in (write, update):
        assert row["verified"] and row["limit"] in ("memcpy", "memcpy_nt") and row["ratio"] > 0
        assert sum(each["pairs"] for each in row["codings"].values()) == 4  # which pays depends on this machine
        assert row["processes"] == 5 and row["bytes"] >= 1 << 20
        for rate in (row["gbytes_per_s"], row["limit_gbytes_per_s"]):
            assert 0 < rate["min"] <= rate["median"] <= rate["max"]


@pytest.mark.slow
def test_trainers_with_uneven_shards_bring_the_whole_model() -> None:
    """200 rows among 6: five hold 34, one holds 30, and no border of a shard is a multiple of anything."""
    command = [
        sys.executable,
        "-m",
        "asyncfabric_services",
        "bench",
        "weights",
        "--json",
        "--trainers",
        "6",
        "--rollouts",
        "1",
        "--model",
        "64KiB",
        "--side",
        "200",
        "--repeats",
        "2",
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    assert all(json.loads(line)["verified"] for line in run.stdout.splitlines())
    assert "3/3" in run.stderr, "the bar counts the first update and the repeats"
