"""The way there: records with private rows at once, the rest once all records are known, then one gather of all rows.

Runs on the event loop's thread. At most two writes to each peer: one with the record and the private rows; one with the
rest, unless the receiver's area is too small and it takes more passes.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
import numpy as np

from asyncfabric.moe.arrivals import Kind
from asyncfabric.moe.lane import Lane, LaneStep
from asyncfabric.moe.passes import Segment
from asyncfabric.moe.record import Bytes, Rows, read_record, record_bytes, write_record
from asyncfabric.moe.routing import Ints, plan_route

Arrange = Callable[[Rows], Ints]
"""Given what all arrived rows are about, returns for each output row the arrived row it is a copy of, or -1."""


async def send_rows(lane: Lane, number: int, payload: Bytes, about: Rows, owned: Ints) -> LaneStep:
    """Begin a step: push the record and the private rows to every member.

    Args:
        lane: to send on.
        number: of the step; the steps of a lane have the numbers 0, 1, 2 ...
        payload: shape [tokens, row_bytes]; must stay as it is until `receive_rows` has returned.
        about: what the tokens are about.
        owned: shape [tokens, top_k]: the member of each choice, or -1.

    Raises:
        MissingRankError: a member is lost.

    Cancellation: nothing was sent, the step did not begin.
    """
    await lane.settle("told")
    await lane.settle("records")
    shape, memory = lane.shape, lane.memory
    route = plan_route(owned, shape.members)
    counts = route.counts
    step = LaneStep(number, number % shape.in_flight, route, payload)
    targets = []
    for member in range(shape.members):
        tokens = route.of(member)
        rows = Rows(
            about.origins[tokens],
            np.where(owned[tokens] == member, about.experts[tokens], np.int32(-1)),
            about.weights[tokens],
            about.scales[tokens],
        )
        ours = member == lane.me
        front = memory.front(step.turn, member) if ours else memory.staged_front(member)
        write_record(front, shape, lane.me, number, counts, rows)
        at = shape.slot_row(step.turn, member) if ours else memory.staged_slot_row(member)
        count = min(len(tokens), shape.private)
        if count:
            place = (memory.rows if ours else memory.staged)[at : at + count]
            np.take(payload, tokens[:count], axis=0, out=place, mode="clip")
        if not ours:
            length = record_bytes(shape, len(tokens))
            there = shape.slot_row(step.turn, lane.me) * shape.row_bytes - length
            targets.append((member, at * shape.row_bytes - length, there, length + count * shape.row_bytes))
    await lane.post("records", memory.staging, Kind.RECORD, step.turn, targets)
    return step


async def receive_rows(lane: Lane, step: LaneStep, arrange: Arrange) -> Bytes:
    """Send the rest, wait for everything, and return the arrived rows as `arrange` wants them.

    Raises:
        MissingRankError: a member is lost, or late for the caller's deadline.
        RemoteProtocolError: a member sent something else than its record of this step.

    Cancellation: nothing is lost; call it again with the same step.
    """
    shape, memory = lane.shape, lane.memory
    if step.counts is None:
        await lane.arrivals.wait(Kind.RECORD, step.turn, range(shape.members), _what(step, "records"), lane.names)
        read_all(lane, step)
    assert step.rows is not None
    row_of = arrange(step.rows)
    address, number_of = _addresses(lane, step)
    source = address[row_of]
    if lane.plan(step, "rest", lane.me).passes <= 1:
        while await _go_on(lane, step):
            pass
        return _gathered(memory.rows, source)
    number_of_output = number_of[row_of]
    if step.partial is None:
        # Rows are taken as their pass comes; until then the gather reads the row of zeros in their place.
        step.partial = _gathered(memory.rows, np.where(number_of_output < 0, source, 0))
    out = step.partial

    def take(number: int) -> None:
        places = np.flatnonzero(number_of_output == number)
        out[places] = memory.rows[source[places]]

    while await _go_on(lane, step, take):
        pass
    step.partial = None
    return out


def read_all(lane: Lane, step: LaneStep) -> None:
    """Read the records of all members; they have arrived."""
    shape = lane.shape
    records = [
        read_record(lane.memory.front(step.turn, member), shape, lane.me, member, step.number)
        for member in range(shape.members)
    ]
    step.rows = Rows(
        np.concatenate([record.rows.origins for record in records]),
        np.concatenate([record.rows.experts for record in records]),
        np.concatenate([record.rows.weights for record in records]),
        np.concatenate([record.rows.scales for record in records]),
    )
    step.counts = np.stack([record.counts for record in records])
    offsets = np.zeros(shape.members + 1, dtype=np.int64)
    np.cumsum(step.counts[:, lane.me], out=offsets[1:])
    step.offsets = offsets


def _addresses(lane: Lane, step: LaneStep) -> tuple[Ints, Ints]:
    """Return for each arrived row, and last for -1, the region's row it comes to, and its pass: -1 for private ones."""
    assert step.offsets is not None
    shape, count = lane.shape, int(step.offsets[-1])
    address = np.zeros(count + 1, dtype=np.int64)
    number_of = np.full(count + 1, -1, dtype=np.int64)
    plan = lane.plan(step, "rest", lane.me)
    for member in range(shape.members):
        begin, end = int(step.offsets[member]), int(step.offsets[member + 1])
        rest = min(begin + shape.private, end)
        first = shape.slot_row(step.turn, member)
        address[begin:rest] = np.arange(first, first + rest - begin)
        for number in range(plan.passes):
            segment = plan.segment(member, number)
            area = shape.area_row(step.turn) + segment.at
            address[rest + segment.begin : rest + segment.end] = np.arange(area, area + segment.rows)
            number_of[rest + segment.begin : rest + segment.end] = number
    return address, number_of


async def _go_on(lane: Lane, step: LaneStep, take: Callable[[int], None] | None = None) -> bool:
    """Do the next pass: post our part of it, take what came. Returns False when there is none left.

    What follows a wait is shielded: the arrivals count as seen by then, so it must not be done by halves.
    """
    shape, mine = lane.shape, lane.plan(step, "rest", lane.me)
    last = max(lane.plan(step, "rest", member).passes for member in range(shape.members))
    number = step.taken
    if number >= last:
        return False
    if step.posted == number:
        outgoing = lane.outgoing(step, "rest", number)
        if number:
            waiting = [member for member, _ in outgoing]
            await lane.arrivals.wait(Kind.REST_TAKEN, step.turn, waiting, _what(step, "room for rows"), lane.names)
        with anyio.CancelScope(shield=True):
            await _post_rest(lane, step, outgoing)
        step.posted += 1
    if number < mine.passes:
        senders = mine.senders(number)
        await lane.arrivals.wait(Kind.REST, step.turn, senders, _what(step, "rows"), lane.names)
        if take is not None:
            take(number)
        if number + 1 < mine.passes:
            with anyio.CancelScope(shield=True):
                await lane.tell(Kind.REST_TAKEN, step.turn, mine.senders(number + 1))
    step.taken += 1
    return True


async def _post_rest(lane: Lane, step: LaneStep, outgoing: list[tuple[int, Segment]]) -> None:
    """Post our part of one pass; as many transfers as the staging area makes necessary, mostly one."""
    shape, memory = lane.shape, lane.memory
    targets: list[tuple[int, int, int, int]] = []
    used = shape.area_rows  # so that the first row settles what was posted before
    for member, segment in outgoing:
        first, last = shape.private + segment.begin, shape.private + segment.end
        tokens = step.route.of(member)[first:last]
        there = shape.area_row(step.turn) + segment.at
        if member == lane.me:
            np.take(step.payload, tokens, axis=0, out=memory.rows[there : there + segment.rows], mode="clip")
            continue
        if used + segment.rows > shape.area_rows:
            await lane.post("rest", memory.staging, Kind.REST, step.turn, targets)
            await lane.settle("rest")
            targets, used = [], 0
        at = memory.staged_area_row + used
        np.take(step.payload, tokens, axis=0, out=memory.staged[at : at + segment.rows], mode="clip")
        width = shape.row_bytes
        targets.append((member, at * width, there * width, segment.rows * width))
        used += segment.rows
    await lane.post("rest", memory.staging, Kind.REST, step.turn, targets)


def _gathered(rows: Bytes, places: Ints) -> Bytes:
    out = np.empty((len(places), rows.shape[1]), dtype=np.uint8)
    return np.take(rows, places, axis=0, out=out, mode="clip")


def _what(step: LaneStep, what: str) -> str:
    return f"step {step.number} waits for {what}"
