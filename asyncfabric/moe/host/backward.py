"""The way back: one write to each peer with its rows, and their sum in fp32 in a fixed order.

Runs on the event loop's thread. A token's rows come from the members that it went to, at most one from each; they are
added up in fp32, beginning with the own member and going round the circle. Neither the order of arrival nor the number
of passes changes that order, so the result is the same bit for bit (MOE-3).
"""

from __future__ import annotations

import anyio
import torch

from asyncfabric._kernels.rows import Part
from asyncfabric.moe.host.arrivals import ArrivalKind
from asyncfabric.moe.host.lane import Lane, LaneStep
from asyncfabric.moe.host.loops import KINDS, row_loops, rows_of
from asyncfabric.moe.host.passes import NOTHING, circle
from asyncfabric.moe.host.posting import Fill, PassRows, post_back


async def send_back(lane: Lane, step: LaneStep, fill: Fill) -> None:
    """Send the first pass of what goes back, mostly all of it: one write to each peer, also where there are no rows.

    Raises:
        MissingRankError: a member is lost.

    Cancellation: shielded once it has begun; the fabric bounds it by its deadlines.
    """
    if step.back_posted == 0:
        await _post_back(lane, step, 0, fill)
        step.back_posted = 1


async def receive_back(lane: Lane, step: LaneStep, fill: Fill) -> torch.Tensor:
    """Wait for what comes back and return its sums, one row for each token of the step.

    Raises:
        MissingRankError: a member is lost, or late for the caller's deadline.

    Cancellation: nothing is lost; call it again with the same step.
    """
    mine = lane.plan(step, "back", lane.me)
    last = max(1, lane.passes(step, "back"))
    while step.back_taken < last:
        number = step.back_taken
        if step.back_posted == number:
            waiting = [member for member, _ in lane.outgoing(step, "back", number)]
            await lane.arrivals.wait(
                ArrivalKind.BACK_TAKEN, step.turn, waiting, _what(step, "room for results"), lane.names
            )
            await _post_back(lane, step, number, fill)
            step.back_posted += 1
        # The first pass has a message from everybody: it also means that our rows there were taken (MOE-1).
        senders = range(lane.shape.members) if number == 0 else mine.senders(number) if number < mine.passes else []
        await lane.arrivals.wait(ArrivalKind.BACK, step.turn, senders, _what(step, "results"), lane.names)
        if mine.passes > 1 and number < mine.passes:
            if step.sums is None:
                width = lane.shape.back_row_bytes // lane.memory.back_dtype.itemsize
                step.sums = torch.zeros((len(step.payload), width), dtype=torch.float32)
            rows, parts = lane.memory.incoming.back[step.turn], _parts(lane, step, number)
            kind = KINDS[lane.memory.back_dtype]
            row_loops().gather_sums(rows, kind, step.route.tokens, parts, step.sums.numpy())
            if number + 1 < mine.passes:
                with anyio.CancelScope(shield=True):
                    await lane.send_empty(ArrivalKind.BACK_TAKEN, step.turn, mine.senders(number + 1))
        step.back_taken += 1
    return _sums(lane, step)


def _sums(lane: Lane, step: LaneStep) -> torch.Tensor:
    """Return the sums, rounded once."""
    rows, dtype = lane.memory.incoming.back[step.turn], lane.memory.back_dtype
    if step.sums is not None:
        return step.sums.to(dtype)
    result = torch.empty((len(step.payload), rows.shape[1] // dtype.itemsize), dtype=dtype)
    parts = _parts(lane, step, 0)
    row_loops().add_rows(rows, KINDS[dtype], step.route.tokens, parts, rows_of(result))
    return result


def _parts(lane: Lane, step: LaneStep, number: int) -> list[Part]:
    """Return where the rows of each member lie in one pass, in the order of the circle: that of the sum."""
    plan, bounds = lane.plan(step, "back", lane.me), step.bounds
    found: list[Part] = []
    if number < plan.passes:
        for member in plan.senders(number):
            begin, end, at = plan.segment(member, number)
            found.append((bounds[member] + begin, bounds[member] + end, at))
    return found


async def _post_back(lane: Lane, step: LaneStep, number: int, fill: Fill) -> None:
    """Post our part of one pass; cancellation: as `post_back`."""
    assert step.offsets is not None
    segments, bounds = dict(lane.outgoing(step, "back", number)), step.offsets
    outgoing: list[PassRows] = []
    for member in circle(lane.me, lane.shape.members):
        segment = segments.get(member, NOTHING)
        if segment.rows:
            first = bounds[member]
            outgoing.append(PassRows(member, (first + segment.begin, first + segment.end), segment.at))
        elif number == 0 and member != lane.me:  # the first pass has a message for everybody
            outgoing.append(PassRows(member, (0, 0), 0))
    await post_back(lane, step.turn, outgoing, fill)


def _what(step: LaneStep, what: str) -> str:
    return f"step {step.number} waits for {what}"
