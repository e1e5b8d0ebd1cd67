"""`asyncfabric bench kv`: real processes, whole rows, checked bytes. Speed is not judged."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from availability import need

SMALL = ("--repeats", "2", "--count", "2", "--region", "4MiB", "--deadline", "60s", "--json")
PROMISED = {
    "bench", "provider", "bytes", "pages", "window", "processes", "gbytes_per_s", "ops_per_s", "p50_us", "p99_us",
    "verified", "limit", "ratio", "layers", "host_us_per_page",
}  # fmt: skip


def bench_kv(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asyncfabric_services", "bench", "kv", *arguments, *SMALL]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("provider", "memory", "limit"),
    [("local", "allocated", "memcpy"), ("local", "foreign", "cma_pages"), ("tcp", "allocated", None)],
)
def test_rows_are_whole_and_verified(provider: str, memory: str, limit: str | None) -> None:
    need(provider)
    run = bench_kv("--page-bytes", "4KiB,64KiB", "--pages", "32", "--layers", "4", "--provider", provider,
                   "--memory", memory)  # fmt: skip
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert [(row["bytes"], row["pages"], row["layers"]) for row in rows] == [(4096, 32, 4), (65536, 32, 4)]
    for row in rows:
        assert row.keys() >= PROMISED and row["bench"] == "kv" and row["verified"] is True
        assert row["ratio"] > 0 and row["host_us_per_page"] > 0
        assert limit is None or row["limit"] == limit


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong", [("--page-bytes", "100"), ("--page-bytes", "1MiB", "--layers", "8"), ("--layers", "0")]
)
def test_wrong_use_is_status_2(wrong: tuple[str, ...]) -> None:
    assert bench_kv(*wrong).returncode == 2
