"""The waits of a node that streams: requests for sources, streams for acknowledgements, tasks for pages.

Pure but for reading the clock; runs on the event loop's thread. The lines are a picture of the moment, for people
and for scripts: nothing may be decided by it.
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncfabric import Fabric, Waiting
from asyncfabric.kv.inbox import KvInbox, KvRequest
from asyncfabric.kv.loss import NEVER
from asyncfabric.kv.outbox import KvJob, KvOutbox
from asyncfabric.kv.pool import KvPool
from asyncfabric.kv.protocol import TargetState

MOST_HOLDERS = 4
"""Holders of pages that are named to who waits for pages, those with most pages first."""


def waiting(fabric: Fabric, pools: Iterable[KvPool] = (), ends: Iterable[KvInbox | KvOutbox] = ()) -> list[Waiting]:
    """Return who waits for what on a node that streams, what is missing and from whom; oldest first.

    Instead of the bare counters of `fabric.why()` stand the requests that they belong to, with the names of their
    sources. The channel's own wait for messages and the watches for lost peers are left out: they never end.

    Args:
        fabric: of the node.
        pools: whose queues are reported.
        ends: inboxes and outboxes on the fabric.
    """
    lines: list[Waiting] = []
    shown: set[int] = set()  # imms of counters that a request's line stands for
    for end in ends:
        if isinstance(end, KvInbox):
            for request in end.requests:
                lines += request_waits(request)
                shown.update(request.lease.imms)
        else:
            lines += [job_waits(job) for job in end.serving]
    for pool in pools:
        lines += pool_waits(pool)
    lines += [
        line
        for line in fabric.why()
        if line.need < NEVER and line.what != "messages()" and line.detail.get("imm", -1) not in shown
    ]
    return sorted(lines, key=lambda line: line.since or float("inf"))


def request_waits(request: KvRequest) -> list[Waiting]:
    """Return the line of a request: for pages of its sources, or for them to confirm that they stopped; or none."""
    machine, lease = request.machine, request.lease
    late = tuple(request.names.get(int(str(one)), f"fabric {int(str(one)):016x}") for one in machine.undecided)
    if machine.state is TargetState.CANCELLING:
        decided = len(machine.verdicts) - len(machine.undecided)
        return [_line(request, "its sources to confirm that they stopped", decided, len(machine.verdicts), late)]
    imms = lease.imms
    if machine.over or lease.released or not imms or lease.arrived_all():
        return []
    goal = f"arrivals of imm {imms[0]}" if len(imms) == 1 else f"arrivals of {len(imms)} imms"
    return [_line(request, goal, lease.arrived, lease.expected, late, imms[0])]


def job_waits(job: KvJob) -> Waiting:
    """Return the line of a job of a source: what its stream has to do next."""
    offer = job.offer
    what = f"stream to lease {offer.lease} of fabric {offer.target:016x}"
    if job.stream is None:
        return Waiting(what, "its first page", 0, 1, since=job.since, detail={"lease": offer.lease})
    at = job.stream.progress()
    detail = {"lease": offer.lease, "bytes": job.stream.bytes, "backlog": at.queued}
    if at.ending:
        return Waiting(what, "what is posted to drain", at.pieces, at.need, since=job.since, detail=detail)
    if at.pieces < at.need:
        goal = "room in the engine" if at.queued else "pieces to be computed"
        return Waiting(what, goal, at.pieces, at.need, since=job.since, detail=detail)
    missing = (f"fabric {offer.target:016x}",) if at.acknowledged < at.submitted else ()
    goal = "acknowledgements" if missing else "its end"
    return Waiting(what, goal, at.acknowledged, at.submitted, missing, job.since, detail)


def pool_waits(pool: KvPool) -> list[Waiting]:
    """Return a line for each task that waits for pages; `missing_from` are those who hold most."""
    held = sorted(pool.owners().items(), key=lambda one: -one[1])[:MOST_HOLDERS]
    holders = tuple(f"{owner} ({pages} pages)" for owner, pages in held if pages)
    free, goal = pool.ledger.free, "pages"
    if pool.revoker.holds_back():
        goal, holders = "pages; quarantined ones are fenced first", ()
    return [
        Waiting(ticket.owner, goal, min(free, ticket.pages), ticket.pages, holders, ticket.since)
        for ticket in pool.queue
    ]


def _line(request: KvRequest, goal: str, have: int, need: int, late: tuple[str, ...], imm: int = -1) -> Waiting:
    lease = request.lease
    detail = {"lease": lease.number} | ({"imm": imm} if imm >= 0 else {})
    return Waiting(f"{lease.owner}, lease {lease.number}", goal, have, need, late, request.since, detail)
