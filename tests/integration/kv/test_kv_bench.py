"""`asyncfabric bench kv`: real processes, whole rows, checked bytes. Speed is not judged."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from availability import need

SMALL = ("--repeats", "2", "--count", "2", "--region", "4MiB", "--deadline", "60s", "--json")
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
    "layers",
    "host_us_per_page",
    "chunks",
    "together",
    "pushes",
    "push_cpu_us",
    "write_pages_cpu_us",
    "write_pages_ratio",
}


def bench_kv(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asyncfabric_services", "bench", "kv", *arguments, *SMALL]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("provider", "memory", "limit", "more", "pushes"),
    [
        ("local", "allocated", "memcpy", ("--chunks", "3"), 12),
        ("local", "foreign", "cma_pages", ("--chunks", "9", "--together"), 8),
        ("tcp", "allocated", None, (), 4),
    ],
)
def test_rows_are_whole_and_verified(
    provider: str, memory: str, limit: str | None, more: tuple[str, ...], pushes: int
) -> None:
    """Of 8 pages of a layer; chunks without a page are left out."""
    need(provider)
    run = bench_kv(
        "--page-bytes",
        "4KiB,64KiB",
        "--pages",
        "32",
        "--layers",
        "4",
        "--provider",
        provider,
        "--memory",
        memory,
        *more,
    )
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert [(row["bytes"], row["pages"], row["layers"]) for row in rows] == [(4096, 32, 4), (65536, 32, 4)]
    for row in rows:
        assert row.keys() >= PROMISED and row["bench"] == "kv" and row["verified"] is True
        assert row["ratio"] > 0 and row["host_us_per_page"] > 0 and row["write_pages_ratio"] > 0
        assert row["pushes"] == pushes and row["push_cpu_us"] > 0 and row["write_pages_cpu_us"] > 0
        assert limit is None or row["limit"] == limit


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong", [("--page-bytes", "100"), ("--page-bytes", "1MiB", "--layers", "8"), ("--layers", "0"), ("--chunks", "0")]
)
def test_wrong_use_is_status_2(wrong: tuple[str, ...]) -> None:
    assert bench_kv(*wrong).returncode == 2
