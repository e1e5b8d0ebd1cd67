"""From the time stamps of both processes to the figures of one prompt. Pure; nanoseconds of one shared clock.

A write is busy from its submission to its completion, of which what lies before the computation does not count: a GPU's
writes are submitted before their layers are computed. `busy` is the length of the union of these
intervals, `hidden_share` the part of that union that lies before the end of the prompt's computation.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from asyncfabric_services.demo.pair.protocol import PairAnswer, Pushed


class Figures(msgspec.Struct, frozen=True):
    """What is shown of one prompt. Durations are milliseconds."""

    id: int
    prompt_tokens: int
    pages: int
    bytes: int
    stream_ms: float
    busy_ms: float
    gbytes_per_s: float
    hidden_share: float
    ttft_one_process_ms: float
    ttft_streamed_ms: float
    decode_step_ms: float
    identical: bool
    differences: list[str]
    text: str


def busy_ns(intervals: Iterable[tuple[int, int]], until: int | None = None) -> int:
    """Return the length of the union of (start, end) intervals, of what lies before `until` if that is given."""
    total, reached = 0, None
    for start, end in sorted(intervals):
        stop = end if until is None else min(end, until)
        begin = start if reached is None else max(start, reached)
        total += max(0, stop - begin)
        reached = stop if reached is None else max(reached, stop)
    return total


def figures(pushed: Pushed, answer: PairAnswer) -> Figures:
    """Join what both sides reported of one prompt."""
    spans = [(max(write.submitted_ns, pushed.compute_start_ns), write.completed_ns) for write in pushed.writes]
    busy = busy_ns(spans)
    hidden = busy_ns(spans, pushed.compute_end_ns)
    first = min(start for start, _ in spans)
    return Figures(
        id=answer.id,
        prompt_tokens=answer.prompt_tokens,
        pages=pushed.pages,
        bytes=pushed.bytes,
        stream_ms=(answer.last_arrival_ns - first) / 1e6,
        busy_ms=busy / 1e6,
        gbytes_per_s=pushed.bytes / busy if busy else 0.0,
        hidden_share=hidden / busy if busy else 1.0,
        ttft_one_process_ms=answer.ttft_one_process * 1e3,
        ttft_streamed_ms=answer.ttft_streamed * 1e3,
        decode_step_ms=answer.step_seconds * 1e3,
        identical=not answer.differences,
        differences=answer.differences,
        text=answer.text,
    )
