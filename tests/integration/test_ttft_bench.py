"""`asyncfabric bench ttft`: a prefill and a decode process, whole rows, equal logits. Speed is not judged."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from asyncfabric_services.bench.commands import bench

for needed in ("torch", "transformers", "hypercorn"):
    pytest.importorskip(needed, reason=f"the nodes need {needed}")

SMALL = ("--layers", "2", "--hidden", "32", "--chunk-tokens", "24", "--repeats", "2", "--deadline", "150s", "--json")
PROMISED = {
    "bench",
    "provider",
    "bytes",
    "pages",
    "window",
    "processes",
    "gbytes_per_s",
    "ops_per_s",
    "p50_us",
    "p99_us",
    "verified",
    "limit",
    "ratio",
    "prompt_tokens",
    "one_process_ms",
    "streamed_ms",
    "gap_ms",
    "step_ms",
    "allowed_ms",
    "within",
    "best_gap_ms",
}


def bench_ttft(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asyncfabric_services", "bench", "ttft", *arguments, *SMALL]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_rows_are_whole_and_both_ways_have_the_same_logits() -> None:
    run = bench_ttft("--prompt-tokens", "1,100")
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert [(row["prompt_tokens"], row["pages"]) for row in rows] == [(1, 2), (100, 14)]
    for row in rows:
        assert row.keys() >= PROMISED
        assert (row["bench"], row["limit"], row["verified"]) == ("ttft", "one_process", True)
        assert row["streamed_ms"] > 0 and row["one_process_ms"] > 0 and row["step_ms"] > 0
        assert row["within"] == (row["gap_ms"] <= row["allowed_ms"])


@pytest.mark.parametrize("wrong", [("--prompt-tokens", "0"), ("--page-tokens", "0"), ("--provider", "pigeon")])
def test_wrong_use_is_status_2(wrong: tuple[str, ...]) -> None:
    assert CliRunner().invoke(bench, ["ttft", *wrong]).exit_code == 2
