"""Posting one pass of a lane: rows are stored where their receivers read them, or staged and written to them.

Runs on the event loop's thread. What the rows are is the caller's: it fills the places that are found here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from asyncfabric import ScatterTarget
from asyncfabric._kernels.rows import Span
from asyncfabric.moe.host.arrivals import ArrivalKind
from asyncfabric.moe.host.lane import Lane
from asyncfabric.moe.host.record import Bytes

Fill = Callable[[Sequence[Span], Sequence[Bytes]], None]
"""`fill(spans, places)` puts the rows of each span into the first rows of its place."""


class PassRows(NamedTuple):
    """What one member gets in a pass: the rows of a span, from row `at` of its area on. No rows: an arrival alone."""

    member: int
    span: Span
    at: int


async def post_rest(lane: Lane, turn: int, outgoing: Iterable[PassRows], fill: Fill) -> None:
    """Post rows that private slots do not hold.

    Cancellation: each wait is shielded, a scope around all of them would cost more than the rest of this.
    """
    shape, memory = lane.shape, lane.memory
    staging = _Staging(memory.staged_rest, memory.staged_rest_offset, shape.rest_offset(turn), shape.row_bytes)
    await _post(lane, "rest", ArrivalKind.REST, turn, outgoing, fill, staging)


async def post_back(lane: Lane, turn: int, outgoing: Iterable[PassRows], fill: Fill) -> None:
    """Post rows that go back.

    Cancellation: as `post_rest`.
    """
    shape, memory = lane.shape, lane.memory
    staging = _Staging(memory.staged_back, memory.staged_back_offset, shape.back_offset(turn), shape.back_row_bytes)
    await _post(lane, "back", ArrivalKind.BACK, turn, outgoing, fill, staging)


class _Staging(NamedTuple):
    """Staging memory of a pass: its rows, and where they and the receiver's area begin in their regions, in bytes."""

    rows: Bytes
    begin: int
    there: int
    width: int


async def _post(
    lane: Lane, what: str, kind: ArrivalKind, turn: int, outgoing: Iterable[PassRows], fill: Fill, staging: _Staging
) -> None:
    """Post in as many transfers as the staging memory makes necessary, mostly one."""
    targets: dict[int, ScatterTarget] = {}
    spans: list[Span] = []
    places: list[Bytes] = []

    async def post() -> None:
        fill(spans, places)
        await lane.post(what, kind, turn, targets, shield=True)

    lane.take_ended(what)
    used = len(staging.rows)  # so that the first row to be staged settles what was posted before
    for member, span, at in outgoing:
        count = span[1] - span[0]
        reached = lane.reach(member)
        if reached is not None:
            if count:
                spans.append(span)
                places.append((reached.rest if kind is ArrivalKind.REST else reached.back)[turn][at:])
            if member != lane.me:
                targets[member] = lane.arrival(member)
            continue
        if not count:
            targets[member] = lane.arrival(member)
            continue
        if used + count > len(staging.rows):
            await post()
            await lane.settle(what)
            targets, spans, places, used = {}, [], [], 0
        spans.append(span)
        places.append(staging.rows[used:])
        begin, there = staging.begin + used * staging.width, staging.there + at * staging.width
        targets[member] = lane.staged(member, begin, there, count * staging.width)
        used += count
    await post()
