"""When each rank was busy with what, as an SVG picture: one row for a rank, darker for busier. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np

from asyncfabric.sim import Prediction
from asyncfabric.sim.prediction import RECEIVER_LANES, TRAINER_LANES, Lane

WIDTH, LEFT, ROW, GAP, TOP = 960, 120, 4, 30, 56
COLUMNS = 240
MOST_ROWS = 32
SHADES = 6
COLOURS: dict[Lane, str] = {
    "bring": "#8a6d3b",
    "convert": "#8e44ad",
    "write": "#2c6fbb",
    "receive": "#2e8b57",
    "forward": "#c0392b",
}


def draw_svg(prediction: Prediction, title: str) -> str:
    """Return a complete SVG document; of many ranks every n-th is drawn."""
    lanes = [*TRAINER_LANES, *RECEIVER_LANES]
    rows = {lane: _sample(prediction.activity[lane].shape[1]) for lane in lanes}
    height = TOP + sum(len(chosen) * ROW + GAP for chosen in rows.values()) + 30
    body, y = [], TOP
    end_s = prediction.predicted_s
    for lane in lanes:
        body.append(f'<text x="8" y="{y + 12}">{lane}</text>')
        body.append(f'<text x="8" y="{y + 26}" fill="#777">{_ranks(prediction, lane)}</text>')
        for row, rank in enumerate(rows[lane]):
            body += _row(prediction, lane, rank, y + row * ROW, end_s)
        y += len(rows[lane]) * ROW + GAP
    body += _axis(end_s, y - GAP + 8)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{height}" '
        f'viewBox="0 0 {LEFT + WIDTH + 20} {height}" font-family="ui-sans-serif, sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n<text x="8" y="22" font-size="15">{escape(title)}</text>\n'
        f'<text x="8" y="40" fill="#555">predicted {end_s:.3f} s, floor {prediction.floor_s:.3f} s</text>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _sample(ranks: int) -> list[int]:
    return sorted({round(rank) for rank in np.linspace(0, ranks - 1, min(ranks, MOST_ROWS)).tolist()})


def _ranks(prediction: Prediction, lane: Lane) -> str:
    count = prediction.activity[lane].shape[1]
    return f"{min(count, MOST_ROWS)} of {count} ranks"


def _row(prediction: Prediction, lane: Lane, rank: int, y: int, end_s: float) -> Iterator[str]:
    busy = prediction.activity[lane][:, rank]
    edges = np.linspace(0, end_s / prediction.assumed.step_s, COLUMNS + 1)
    sums = np.concatenate([[0.0], np.cumsum(busy)])
    means = np.diff(np.interp(edges, np.arange(len(sums)), sums)) / np.diff(edges)
    shades = np.ceil(np.clip(means, 0, 1) * SHADES - 1e-6).astype(int)
    begins = np.flatnonzero(np.diff(shades, prepend=-1))
    for begin, end in zip(begins, [*begins[1:], COLUMNS], strict=True):
        if shades[begin]:
            x, width = LEFT + begin * WIDTH / COLUMNS, (end - begin) * WIDTH / COLUMNS
            opacity = shades[begin] / SHADES
            yield (
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 1}" fill="{COLOURS[lane]}" '
                f'fill-opacity="{opacity:.2f}"/>'
            )


def _axis(end_s: float, y: int) -> Iterator[str]:
    yield f'<line x1="{LEFT}" y1="{y}" x2="{LEFT + WIDTH}" y2="{y}" stroke="#999"/>'
    for tick in range(11):
        x = LEFT + WIDTH * tick / 10
        label = f"{end_s * tick / 10 * 1000:.0f} ms"
        yield f'<text x="{x:.0f}" y="{y + 16}" text-anchor="middle" fill="#555">{label}</text>'
