"""Rows as a table for people: what, how fast, and how far from what the machine can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich.table import Table

from asyncfabric_services.quantities import format_size

COLUMNS = (
    "figure",
    "provider",
    "bytes",
    "pages",
    "window",
    "GB/s",
    "kop/s",
    "p50 us",
    "p99 us",
    "limit",
    "ratio",
    "ok",
)


TEXT_COLUMNS = ("figure", "provider", "limit")

WIDE = 150
"""Characters from which (min..max) and every column fit."""


def row_table(title: str, rows: Sequence[Mapping[str, Any]], width: int) -> Table:
    """Build the table; medians, with (min..max) behind them where the terminal is wide enough.

    Columns in which no row states anything are left out.
    """
    texts = [cells(row, width >= WIDE) for row in rows]
    used = [index for index in range(len(COLUMNS)) if any(line[index] not in ("-", "none") for line in texts)]
    table = Table(title=title, title_justify="left")
    for index in used:
        justify: Literal["left", "right"] = "left" if COLUMNS[index] in TEXT_COLUMNS else "right"
        table.add_column(COLUMNS[index], justify=justify, no_wrap=True)
    for line in texts:
        table.add_row(*(line[index] for index in used))
    return table


def cells(row: Mapping[str, Any], wide: bool) -> list[str]:
    """Return the texts of one row, in the order of COLUMNS."""
    return [
        figure(row),
        str(row["provider"]),
        format_size(row["bytes"]) if row["bytes"] else "-",
        str(row["pages"]) if row["pages"] != 1 else "-",
        str(row["window"]) if row["window"] != 1 else "-",
        spread(row["gbytes_per_s"], 1.0, 2, wide),
        spread(row["ops_per_s"], 1e-3, 1, wide),
        latency(row["p50_us"]),
        latency(row["p99_us"]),
        str(row.get("limit", "-")) if row["bench"] != "limits" else "-",
        f"{row['ratio']:.2f}" if "ratio" in row else "-",
        "yes" if row["verified"] else "NO",
    ]


def figure(row: Mapping[str, Any]) -> str:
    """Return what the row is about, with the one number that its bench is about."""
    if "targets" in row:
        return f"to {row['targets']}, {row['us_per_target']:.2f} us each"
    if "core_share" in row:
        return f"idle: {row['core_share']:.2%} of a core"
    if "growth_bytes" in row:
        return f"unawaited, growth {row['growth_bytes'] / 1e6:.1f} MB"
    if row["bench"] == "nixl":
        bare = f", {row['over_bare']:.2f} x bare" if "over_bare" in row else ""
        return f"{row['rails']} {row['figure']}{bare}"
    if "push_cpu_us" in row:
        return f"{row['figure']}, {row['push_cpu_us']:.1f} us a push"
    if row["figure"] == "call-keeps-loop":
        return "call keeps the loop"
    return str(row["limit"] if row["bench"] == "limits" else row["figure"])


def spread(rate: Mapping[str, float], scale: float, digits: int, wide: bool) -> str:
    """Return `median (min..max)`, or a dash for what does not apply."""
    if rate["max"] == 0:
        return "-"
    low, middle, high = (f"{rate[name] * scale:.{digits}f}" for name in ("min", "median", "max"))
    return f"{middle} ({low}..{high})" if wide else middle


def latency(value: float | None) -> str:
    """Return microseconds."""
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"
