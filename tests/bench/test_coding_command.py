"""Ring 7, as smoke: `bench coding` trains a small model for two steps; codings are exact. Speed is not judged."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("transformers", reason="the bench trains a model of transformers")


@pytest.mark.slow
def test_rows_of_a_real_training_run() -> None:
    command = [
        sys.executable,
        "-m",
        "asyncfabric_services",
        "bench",
        "coding",
        "--json",
        "--repeats",
        "2",
        "--layers",
        "2",
        "--hidden",
        "256",
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert [row["coding"] for row in rows] == ["delta", "exponent"]
    assert all(row["verified"] and len(row["sent_bytes"]) == 2 for row in rows)
    delta, exponent = rows
    assert delta["share"] < 0.1 < exponent["share"] < 0.8
