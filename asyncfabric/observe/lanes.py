"""Spans as slices of a picture: on lanes where they nest, with arrows from process to process. Pure.

Slices of one lane must lie inside one another or apart, so spans that merely overlap get lanes of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from asyncfabric.observe.spans import Span

FIRST_LANE = 100  # number of the track; the engine's own are below


class Placed(NamedTuple):
    """A span with its process, its lane and its times in nanoseconds of the picture."""

    span: Span
    process: int
    lane: int
    begin_ns: int
    end_ns: int


def place(spans: Iterable[Span], process: int, shift_ns: int) -> list[Placed]:
    """Return the spans of one process on lanes; `shift_ns` turns their times into those of the picture."""
    lanes: list[list[Span]] = []  # of each lane the spans that enclose what comes next, outermost first
    placed = []
    for span in sorted(spans, key=lambda one: (one.begin_ns, -one.end_ns)):
        lane = _lane(lanes, span)
        lanes[lane].append(span)
        placed.append(
            Placed(
                span, process, FIRST_LANE + lane, span.begin_ns + shift_ns, max(span.begin_ns, span.end_ns) + shift_ns
            )
        )
    return placed


def draw(placed: Iterable[Placed]) -> Iterator[dict[str, Any]]:
    """Yield the slices, the names of their lanes, and an arrow to each span from a parent in another process."""
    every = list(placed)
    for process, lane in sorted({(one.process, one.lane) for one in every}):
        name = {"name": f"requests {lane - FIRST_LANE + 1}"}
        yield {"ph": "M", "pid": process, "tid": lane, "name": "thread_name", "args": name}
    by_id = {(one.span.trace, one.span.id): one for one in every}
    for one in every:
        span = one.span
        place = {"pid": one.process, "tid": one.lane, "cat": "span"}
        about = {"trace": span.trace, "span": span.id, "parent": span.parent}
        length_us = (one.end_ns - one.begin_ns) / 1000
        args = {**span.args, **about}
        yield {"ph": "X", **place, "ts": one.begin_ns / 1000, "dur": length_us, "name": span.name, "args": args}
        parent = by_id.get((span.trace, span.parent))
        if parent is not None and parent.process != one.process:
            leaves_ns = min(max(one.begin_ns, parent.begin_ns), parent.end_ns)
            arrow = {"name": "request", "cat": "span", "id": f"{span.trace}.{span.id}"}
            yield {"ph": "s", "pid": parent.process, "tid": parent.lane, "ts": leaves_ns / 1000, **arrow}
            yield {"ph": "f", "bp": "e", **place, "ts": one.begin_ns / 1000, **arrow}


def _lane(lanes: list[list[Span]], span: Span) -> int:
    for number, enclosing in enumerate(lanes):
        while enclosing and enclosing[-1].end_ns <= span.begin_ns:
            enclosing.pop()
        if not enclosing or (enclosing[-1].end_ns >= span.end_ns and enclosing[-1].trace == span.trace):
            return number
    lanes.append([])
    return len(lanes) - 1
