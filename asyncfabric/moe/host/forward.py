"""The way there: records with private rows at once, the rest once all records are known, then each row to its places.

Runs on the event loop's thread. At most two writes to each peer: one with the record and the private rows; one with the
rest, unless the receiver's area is too small and it takes more passes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import anyio
import numpy as np
from anyio.lowlevel import checkpoint

from asyncfabric._kernels.rows import RowBytes, Span
from asyncfabric.moe.host.arrivals import ArrivalKind
from asyncfabric.moe.host.grouping import Groups
from asyncfabric.moe.host.lane import Lane, LaneStep
from asyncfabric.moe.host.loops import row_loops
from asyncfabric.moe.host.passes import Segment
from asyncfabric.moe.host.posting import PassRows, post_rest
from asyncfabric.moe.host.record import Bytes, Rows, find_route, read_records, write_records
from asyncfabric.moe.host.routing import Ints

Arrange = Callable[[Rows], Groups | None]
"""Given what all arrived rows are about, returns how they are grouped; None: they stay as they came."""


async def send_rows(lane: Lane, number: int, payload: RowBytes, about: Rows, owner: Ints) -> LaneStep:
    """Begin a step: push the record and the private rows to every member.

    Args:
        lane: to send on.
        number: of the step; the steps of a lane have the numbers 0, 1, 2 ...
        payload: shape [tokens, row_bytes]; must stay as it is until `receive_rows` has returned.
        about: what the tokens are about.
        owner: the member of each expert, or -1.

    Raises:
        MissingRankError: a member is lost.

    Cancellation: nothing was sent, the step did not begin.
    """
    await lane.settle("reported")
    await lane.settle("records")
    if number == 1:
        lane.find_mapped()
    shape, memory = lane.shape, lane.memory
    route = find_route(about.experts, owner, shape.members)
    bounds, tokens = route.offsets.tolist(), route.tokens
    step = LaneStep(number, number % shape.in_flight, route, bounds, payload)
    slots = lane.slots(step.turn)
    write_records(slots.fronts, lane.me, number, about, owner, route)
    spans = [(begin, min(end, begin + shape.private)) for begin, end in pairwise(bounds)]
    spans[lane.me] = (0, 0)  # its rows go from the payload to their places
    row_loops().take_rows(payload, tokens, spans, slots.private)
    targets = {}
    for member, (begin, end) in enumerate(spans):
        if member == lane.me:
            continue
        if lane.reach(member) is not None:
            targets[member] = lane.arrival(member)
            continue
        length, width = shape.record_bytes(bounds[member + 1] - bounds[member]), shape.row_bytes
        here, there = memory.staged_slot_row(member) * width, shape.slot_row(step.turn, lane.me) * width
        targets[member] = lane.staged(member, here - length, there - length, length + (end - begin) * width)
    await lane.post("records", ArrivalKind.RECORD, step.turn, targets, shield=False)
    return step


async def receive_rows(lane: Lane, step: LaneStep, arrange: Arrange) -> Bytes:
    """Send the rest, wait for everything, and return the arrived rows as `arrange` wants them.

    Raises:
        MissingRankError: a member is lost, or late for the caller's deadline.
        RemoteProtocolError: a member sent something else than its record of this step.

    Cancellation: nothing is lost; call it again with the same step.
    """
    if step.counts is None:
        await lane.arrivals.wait(
            ArrivalKind.RECORD, step.turn, range(lane.shape.members), _what(step, "records"), lane.names
        )
        read_all(lane, step)
    else:
        await checkpoint()
    assert step.rows is not None
    groups = arrange(step.rows)
    if step.partial is None:
        step.partial = _private_rows(lane, step, groups)
    out = step.partial
    while step.taken < lane.passes(step, "rest"):
        await _go_on(lane, step, groups, out)
    step.partial = None
    return out


def read_all(lane: Lane, step: LaneStep) -> None:
    """Read the records of all members; they have arrived."""
    fronts = lane.memory.arriving[step.turn].fronts
    counts, offsets, step.rows = read_records(fronts, lane.shape, lane.me, step.number)
    step.counts, step.offsets = counts.tolist(), offsets.tolist()


def _private_rows(lane: Lane, step: LaneStep, groups: Groups | None) -> Bytes:
    """Return the output rows, with the own ones, those of the private slots, and padding filled in."""
    assert step.offsets is not None
    shape, bounds = lane.shape, step.offsets
    out = lane.shelf.rows(bounds[-1] if groups is None else int(groups.offsets[-1]), shape.row_bytes)
    if groups is not None and len(groups.row_of) > len(groups.position):
        out[groups.row_of < 0] = 0
    spans = [(begin, min(end, begin + shape.private)) for begin, end in pairwise(bounds)]
    sources: list[RowBytes] = [*lane.memory.arriving[step.turn].private]
    picked: list[Ints | None] = [None] * shape.members
    spans[lane.me], sources[lane.me] = (bounds[lane.me], bounds[lane.me + 1]), step.payload
    picked[lane.me] = step.route.of(lane.me)
    _place(groups, spans, sources, picked, out)
    return out


def _place(
    groups: Groups | None, spans: list[Span], sources: list[RowBytes], picked: list[Ints | None], out: Bytes
) -> None:
    """Copy the arrived rows of the spans, each from its source, to all their places."""
    if groups is not None:
        row_loops().spread_rows(spans, sources, picked, groups.pair_offsets, groups.position, out)
        return
    for (begin, end), rows, index in zip(spans, sources, picked, strict=True):
        if index is not None:
            row_loops().take_rows(rows, index, [(0, end - begin)], [out[begin:end]])
        else:
            assert isinstance(rows, np.ndarray)  # all but the own rows, which are picked
            out[begin:end] = rows[: end - begin]


async def _go_on(lane: Lane, step: LaneStep, groups: Groups | None, out: Bytes) -> None:
    """Do the next pass: post our part of it, take what came.

    What follows a wait is shielded: the arrivals count as seen by then, so it must not be done by halves.
    """
    number = step.taken
    shape, mine = lane.shape, lane.plan(step, "rest", lane.me)
    if step.posted == number:
        outgoing = lane.outgoing(step, "rest", number)
        if number:
            waiting = [member for member, _ in outgoing]
            await lane.arrivals.wait(
                ArrivalKind.REST_TAKEN, step.turn, waiting, _what(step, "room for rows"), lane.names
            )
        await _post_rest(lane, step, outgoing)
        step.posted += 1
    if number < mine.passes:
        senders = mine.senders(number)
        await lane.arrivals.wait(ArrivalKind.REST, step.turn, senders, _what(step, "rows"), lane.names)
        assert step.offsets is not None
        spans: list[Span] = []
        sources: list[RowBytes] = []
        for member in senders:
            if member != lane.me:
                segment, first = mine.segment(member, number), step.offsets[member] + shape.private
                spans.append((first + segment.begin, first + segment.end))
                sources.append(lane.memory.incoming.rest[step.turn][segment.at :])
        _place(groups, spans, sources, [None] * len(spans), out)
        if number + 1 < mine.passes:
            with anyio.CancelScope(shield=True):
                await lane.send_empty(ArrivalKind.REST_TAKEN, step.turn, mine.senders(number + 1))
    step.taken += 1


async def _post_rest(lane: Lane, step: LaneStep, outgoing: list[tuple[int, Segment]]) -> None:
    """Post our part of one pass; cancellation: as `post_rest`."""
    bounds = step.bounds
    firsts = [bounds[member] + lane.shape.private for member, _ in outgoing]
    await post_rest(
        lane,
        step.turn,
        [
            PassRows(member, (first + segment.begin, first + segment.end), segment.at)
            for first, (member, segment) in zip(firsts, outgoing, strict=True)
            if member != lane.me
        ],
        partial(row_loops().take_rows, step.payload, step.route.tokens),
    )


def _what(step: LaneStep, what: str) -> str:
    return f"step {step.number} waits for {what}"
