"""Rows as a picture: rates over sizes, or latencies by figure. Draws without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncfabric_services.quantities import format_size


def label(row: Mapping[str, Any]) -> str:
    """Return what one bar is about."""
    parts = [str(row["limit"] if row["bench"] == "limits" else row["figure"]), str(row["provider"])]
    if row["bytes"]:
        parts.append(format_size(row["bytes"]))
    if row["pages"] != 1:
        parts.append(f"x {row['pages']}")
    return " ".join(parts)


def write_plot(path: Path, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a PNG with one panel for rates and one for latencies, leaving out the one that no row has."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rated = [row for row in rows if row["gbytes_per_s"]["max"] > 0]
    timed = [row for row in rows if row["p50_us"] is not None]
    panels = [panel for panel in ((rated, _draw_rates), (timed, _draw_latencies)) if panel[0]]
    height = 1.5 + 0.28 * sum(len(part) for part, _ in panels)
    figure, axes = pyplot.subplots(len(panels) or 1, 1, figsize=(9, max(3.0, height)), squeeze=False)
    for axis, (part, draw) in zip(axes[:, 0], panels, strict=False):
        draw(axis, part)
        axis.invert_yaxis()
        axis.tick_params(axis="y", labelsize=7)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_rates(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    medians = [row["gbytes_per_s"]["median"] for row in rows]
    below = [row["gbytes_per_s"]["median"] - row["gbytes_per_s"]["min"] for row in rows]
    above = [row["gbytes_per_s"]["max"] - row["gbytes_per_s"]["median"] for row in rows]
    axis.barh(_labels(rows), medians, xerr=[below, above], color="tab:blue", ecolor="tab:gray")
    axis.set_xlabel("GB/s (median, min..max)")


def _draw_latencies(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    p50 = [row["p50_us"] for row in rows]
    tail = [max(0.0, (row["p99_us"] or row["p50_us"]) - row["p50_us"]) for row in rows]
    axis.barh(_labels(rows), p50, color="tab:orange")
    axis.barh(_labels(rows), tail, left=p50, color="moccasin")
    axis.set_xscale("log")
    axis.set_xlabel("us (p50, and up to p99)")


def _labels(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    # Two rows may read the same; the index keeps their bars apart.
    return [f"{index + 1}. {label(row)}" for index, row in enumerate(rows)]
