"""Runs as senders carry them out: the plan counts those of the receiver, a shard may cut them shorter. Pure."""

from __future__ import annotations

import numpy as np

from asyncfabric.weights import Plan
from asyncfabric.weights.boxes import Ints
from asyncfabric.weights.update.rows import PieceShape, in_shard, written_run_bytes


def sent_run_bytes(plan: Plan) -> Ints:
    """Return (pieces,): bytes of one write of each piece, by the rule of both ends."""
    found = plan.pieces.run_bytes.copy()
    for kind in plan.kinds:
        if kind.block or kind.dtype != kind.to:
            continue
        for piece in range(kind.first, kind.first + kind.count):
            shape = PieceShape(plan.pieces, piece, kind.to)
            rank = plan.groups[int(plan.piece_group[piece])][0]
            found[piece] = written_run_bytes(in_shard(plan, kind, rank, piece, shape.order), shape.run_bytes)
    return np.asarray(found)
