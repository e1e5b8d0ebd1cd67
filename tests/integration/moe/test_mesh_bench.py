"""`asyncfabric bench mesh` on host memory: everybody writes to everybody, all bytes looked at, gloo beside."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from asyncfabric_services.bench.commands import bench

KIB = 1 << 10


@pytest.mark.parametrize("processes", [2, 3])
def test_a_ring_and_all_to_all(processes: int) -> None:
    arguments = ["mesh", "--processes", str(processes), "--size", "4KiB,68KiB", "--repeats", "2", "--count", "3"]
    result = CliRunner().invoke(bench, [*arguments, "--json", "--deadline", "120s"], standalone_mode=False)
    assert result.exception is None and result.return_value == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [(row["figure"], row["bytes"]) for row in rows] == [
        (pattern, size) for size in (4 * KIB, 68 * KIB) for pattern in ("ring", "all-to-all")
    ]
    for row in rows:
        assert row["verified"] and row["limit"] == "gloo-send-recv" and row["processes"] == processes
        assert row["gbytes_per_s"]["median"] > 0 and row["ratio"] > 0
