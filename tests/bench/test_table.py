"""Rows as people see them: nothing is cut off, what nobody states is left out."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from asyncfabric.bench.rows import Point, rates
from asyncfabric_services.bench.report.plot import label
from asyncfabric_services.bench.report.table import WIDE, row_table


def row(**changes: Any) -> dict[str, Any]:
    gbytes_per_s, ops_per_s = rates([0.5, 0.25, 1.0], 10, 10 << 20)
    values: dict[str, Any] = {
        "bench": "write",
        "figure": "throughput",
        "provider": "local",
        "bytes": 1 << 20,
        "gbytes_per_s": gbytes_per_s,
        "ops_per_s": ops_per_s,
        "p50_us": 12.345,
        "p99_us": 4567.8,
        "verified": True,
    }
    return Point(**(values | changes)).as_row()


def rendered(rows: list[dict[str, Any]], width: int) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(row_table("title", rows, width))
    return console.export_text()


def test_a_wide_table_shows_the_spread_and_the_ratio() -> None:
    text = rendered([row(window=16, limit="memcpy_nt", ratio=0.876)], WIDE)
    for part in ("throughput", "1 MiB", "16", "0.02 (0.01..0.04)", "12.35", "4568", "memcpy_nt", "0.88", "yes"):
        assert part in text
    assert "pages" not in text  # no row is about pages


def test_a_narrow_table_shows_medians_only_and_wrong_data_loudly() -> None:
    text = rendered([row(verified=False)], 80)
    assert "(0.01..0.04)" not in text and "NO" in text


def test_what_a_row_is_about_is_named() -> None:
    limit = row(bench="limits", figure="limit", limit="cma", provider="none")
    idle = row(bench="notify", figure="idle", detail={"core_share": 0.0012})
    many = row(bench="scatter", figure="scatter", detail={"targets": 64, "us_per_target": 1.5})
    text = rendered([limit, idle, many], WIDE)
    assert "cma" in text and "idle: 0.12% of a core" in text and "to 64, 1.50 us each" in text
    assert label(limit) == "cma none 1 MiB"
