"""Runs as senders carry them out: the plan counts those of the receiver, a shard may cut them shorter. Pure."""

from __future__ import annotations

import numpy as np

from asyncfabric.sim.labour import SentRuns
from asyncfabric.weights import Plan
from asyncfabric.weights.memory.rows import PieceShape, in_shard, is_direct, written_run_bytes
from asyncfabric.weights.sender.shards import is_gathered


def sent_runs(plan: Plan, gathers: bool = False) -> SentRuns:
    """Return the bytes of one write of each piece, by the rule of both ends, and what is put in order for it.

    With `gathers` the rail does that, as for `Program`.
    """
    written = plan.pieces.run_bytes.copy()
    gathered, boxed = np.zeros(len(written), bool), np.zeros(len(written), bool)
    for kind in plan.kinds:
        if kind.block or kind.dtype != kind.to:
            continue
        for piece in range(kind.first, kind.first + kind.count):
            shape = PieceShape(plan.pieces, piece, kind.to)
            rank = plan.groups[int(plan.piece_group[piece])][0]
            lies = in_shard(plan, kind, rank, piece, shape.order)
            written[piece] = written_run_bytes(lies, shape.run_bytes)
            boxed[piece] = gathers and lies is not None and is_gathered(lies, int(written[piece]))
            gathered[piece] = not boxed[piece] and not is_direct(lies, int(written[piece]))
    return SentRuns(written, gathered, boxed)
