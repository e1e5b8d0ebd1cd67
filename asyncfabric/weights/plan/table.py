"""A plan as text: who sends how much to whom, and the first rows of one sender. Pure, for people."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from asyncfabric.weights.plan.assignment import imbalance
from asyncfabric.weights.plan.batch import sent_by
from asyncfabric.weights.plan.plan import Plan


def draw_plan(plan: Plan, rank: int | None = None, rows: int = 20) -> str:
    """Return a table of a plan.

    Args:
        plan: what to draw.
        rank: a trainer whose first rows are listed; None lists replicas only.
        rows: how many of them.
    """
    return "\n".join([*_replicas(plan), *(_rows(plan, rank, rows) if rank is not None else ())])


def _replicas(plan: Plan) -> Iterator[str]:
    sent = plan.bytes_sent()
    yield f"plan {plan.digest}: {plan.rows} rows a replica"
    yield f"{plan.trainers} trainers, {len(plan.replicas)} replicas of {plan.receivers} ranks"
    yield f"sent: {sent.sum()} bytes, max/mean {imbalance(sent):.4f}"
    yield f"{'replica':<20} {'fed by':<20} {'over the network':>18} {'inside nodes':>18} {'max/mean':>9}"
    for one in plan.replicas:
        outer, inner = plan.bytes_received(one.name)
        feeder = one.parent or "trainers"
        yield f"{one.name:<20} {feeder:<20} {outer.sum():>18} {inner.sum():>18} {imbalance(outer):>9.4f}"


def _rows(plan: Plan, rank: int, rows: int) -> Iterator[str]:
    batch = sent_by(plan, rank)
    yield f"trainer {rank}: {len(batch)} rows, {int(plan.piece_bytes[batch.piece].sum())} bytes"
    yield "replica/rank  region @ offset <- parameter [from + size] type (runs x bytes)"
    for row in range(min(rows, len(batch))):
        piece = int(batch.piece[row])
        kind = plan.kinds[int(batch.kind[row])]
        start, size = plan.pieces.start[piece], plan.pieces.size[piece]
        how = kind.to if kind.to == kind.dtype else f"{kind.dtype} -> {kind.to}"
        box = ", ".join(f"{at}+{length}" for at, length in zip(start, size, strict=True))
        yield (
            f"{plan.replicas[int(batch.replica[row])].name}/{batch.receiver[row]}  "
            f"{plan.regions[int(batch.region[row])]} @ {plan.pieces.offset[piece]} <- "
            f"{plan.parameters[int(batch.parameter[row])]} [{box}] {how} "
            f"({plan.pieces.runs[piece]} x {plan.pieces.run_bytes[piece]})"
        )
    if len(batch) > rows:
        receivers = len(np.unique(batch.replica * plan.receivers + batch.receiver))
        yield f"... {len(batch) - rows} more; {receivers} receivers in all"
