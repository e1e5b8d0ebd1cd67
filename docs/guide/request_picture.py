"""Draw the spans of one request, from a recording of `asyncfabric trace record`, as the SVG picture of a guide page.

    python docs/guide/request_picture.py RECORDING.json docs/guide/vllm_request.svg

Of the requests that have all of NAMES it takes the one of median duration, so that neither the first request nor one
beside other work is shown. Pure but for the two files; needs no build.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

NAMES = {"request", "answer", "prefill prompt", "prefill", "push", "load", "decode"}
LEFT, WIDTH, RIGHT, ROW, GAP, TOP = 150, 640, 110, 20, 12, 34
COLOURS = {
    "prefill prompt": "#b9cdea",
    "prefill": "#2c6fbb",
    "push": "#2e8b57",
    "load": "#2e8b57",
    "decode": "#8e44ad",
}
OTHER = "#c9ced6"

Event = dict[str, Any]


def chosen(events: list[Event]) -> list[Event]:
    """Return the spans of the request of median duration; raises ValueError if none has all of NAMES."""
    requests: dict[str, list[Event]] = {}
    for event in events:
        if event["ph"] == "X" and event.get("args", {}).get("trace"):
            requests.setdefault(event["args"]["trace"], []).append(event)
    whole = {
        trace: max(span["dur"] for span in spans if span["name"] == "request")
        for trace, spans in requests.items()
        if {span["name"] for span in spans} >= NAMES
    }
    if not whole:
        raise ValueError(f"no request of the recording has all of {sorted(NAMES)}")
    median = statistics.median_low(whole.values())
    return next(requests[trace] for trace, duration in whole.items() if duration == median)


def draw(events: list[Event]) -> str:
    """Return a complete SVG document."""
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    spans = chosen(events)
    begin = min(span["ts"] for span in spans)
    length = max(span["ts"] + span["dur"] for span in spans) - begin
    body, y = [], TOP
    order = sorted({span["pid"] for span in spans}, key=lambda pid: min(s["ts"] for s in spans if s["pid"] == pid))
    for pid in order:
        rows = sorted((span for span in spans if span["pid"] == pid), key=lambda span: (span["ts"], -span["dur"]))
        body.append(f'<text x="8" y="{y + 14}" font-weight="bold">{escape(processes[pid])}</text>')
        for span in rows:
            body += _row(span, begin, length, y)
            y += ROW
        y += GAP
    height = y + 24
    body += _axis(length, y)
    title = f"{spans_bytes(spans) / 1e6:.0f} MB of KvCache: one request, {length / 1000:.0f} ms"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + RIGHT}" height="{height}" '
        f'viewBox="0 0 {LEFT + WIDTH + RIGHT} {height}" font-family="ui-sans-serif, sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n<text x="8" y="20" font-size="15">{escape(title)}</text>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def spans_bytes(spans: list[Event]) -> int:
    """Return how many bytes were loaded."""
    return sum(int(span["args"].get("bytes", 0)) for span in spans if span["name"] == "load")


def _row(span: Event, begin: float, length: float, y: int) -> Iterator[str]:
    x = LEFT + (span["ts"] - begin) / length * WIDTH
    width = max(1.0, span["dur"] / length * WIDTH)
    yield f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end" fill="#555">{escape(span["name"])}</text>'
    yield (
        f'<rect x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{ROW - 6}" rx="2" '
        f'fill="{COLOURS.get(span["name"], OTHER)}"/>'
    )
    yield f'<text x="{x + width + 5:.1f}" y="{y + 14}" font-size="11">{span["dur"] / 1000:.1f} ms</text>'


def _axis(length: float, y: int) -> Iterator[str]:
    yield f'<line x1="{LEFT}" y1="{y}" x2="{LEFT + WIDTH}" y2="{y}" stroke="#999"/>'
    for part in range(5):
        x = LEFT + WIDTH * part / 4
        yield f'<line x1="{x}" y1="{y}" x2="{x}" y2="{y + 4}" stroke="#999"/>'
        yield f'<text x="{x}" y="{y + 17}" text-anchor="middle">{length * part / 4000:.0f} ms</text>'


def main() -> None:
    """Draw what the arguments name."""
    recording, picture = map(Path, sys.argv[1:])
    picture.write_text(draw(json.loads(recording.read_text())["traceEvents"]))


if __name__ == "__main__":
    main()
