"""Rows as a table for people: what, how fast, and how far from what the machine can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from asyncfabric_services.quantities import format_size

COLUMNS = ("figure", "provider", "bytes", "pages", "window", "GB/s", "kop/s", "p50 us", "p99 us", "limit", "ratio", "ok")


def row_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Build the table; medians, with (min..max) behind them."""
    table = Table(title=title, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("figure", "provider", "limit") else "right")
    for row in rows:
        table.add_row(*cells(row))
    return table


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return the texts of one row, in the order of COLUMNS."""
    return [
        str(row["figure"]),
        str(row["provider"]),
        format_size(row["bytes"]) if row["bytes"] else "-",
        str(row["pages"]) if row["pages"] != 1 else "-",
        str(row["window"]),
        spread(row["gbytes_per_s"], 1.0, 2),
        spread(row["ops_per_s"], 1e-3, 1),
        latency(row["p50_us"]),
        latency(row["p99_us"]),
        str(row.get("limit", "-")),
        f"{row['ratio']:.2f}" if "ratio" in row else "-",
        "yes" if row["verified"] else "NO",
    ]


def spread(rate: Mapping[str, float], scale: float, digits: int) -> str:
    """Return `median (min..max)`, or a dash for what does not apply."""
    if rate["max"] == 0:
        return "-"
    low, middle, high = (f"{rate[name] * scale:.{digits}f}" for name in ("min", "median", "max"))
    return f"{middle} ({low}..{high})"


def latency(value: float | None) -> str:
    """Return microseconds."""
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"
