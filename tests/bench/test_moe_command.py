"""Ring 7, as smoke: `bench moe` with few tokens between real processes, verified and counted. Speed is not judged."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")


@pytest.mark.slow
def test_rows_are_whole_and_compared_with_gloo() -> None:
    command = [
        sys.executable, "-m", "asyncfabric_services", "bench", "moe", "--json", "--processes", "2", "--tokens", "16",
        "--hidden", "128", "--top-k", "3", "--experts", "5", "--private", "4", "--count", "3", "--repeats", "2",
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    (row,) = [json.loads(line) for line in run.stdout.splitlines()]
    assert (row["bench"], row["tokens"], row["processes"], row["verified"]) == ("moe", 16, 2, True)
    assert row["limit"] == "gloo" and row["ratio"] > 0 and row["payload_ratio"] > 0 and row["exchange_ratio"] > 0
    assert row["payload_bytes"] > row["bytes"], "without sending a token once to each rank there is more"
    assert row["requests_per_step"] == [3, 3], "a record, the rest, and one write back"
    for rate in (row["gbytes_per_s"], row["ops_per_s"]):
        assert 0 < rate["min"] <= rate["median"] <= rate["max"]
