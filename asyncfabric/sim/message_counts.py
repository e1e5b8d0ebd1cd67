"""How many messages senders send to receivers of what they have written: the rule of `Share`, for all pairs. Pure."""

from __future__ import annotations

import numpy as np

from asyncfabric.sim.workload import Floats, Workload
from asyncfabric.weights.plan.batch import LEAST_PART, SHARES, begin_of
from asyncfabric.weights.plan.boxes import Ints
from asyncfabric.weights.plan.plan import Plan

LAST_MESSAGES = int(np.log2(LEAST_PART)) + 1
"""Of each pair, worth less than a share."""


def messages_of(work: Workload) -> tuple[Ints, Ints]:
    """Return the messages that each trainer sends and that each receiver gets of trainers in an update.

    What lies long is reported anyway, see `writing.LATEST_S`; that is not counted, updates are short.
    """
    trainers, receivers = len(work.brought), len(work.fed)
    sender = np.repeat(np.arange(trainers), work.first_entry[:, -1] - work.first_entry[:, 0])
    pair = sender * receivers + work.entry_receiver
    order = np.argsort(pair, kind="stable")  # units of a pair stay in their order
    sizes = work.entry_bytes[order]
    pairs, first, count = np.unique(pair[order], return_index=True, return_counts=True)
    total = np.add.reduceat(sizes, first) if len(pairs) else np.zeros(0)
    share = ((work.fed + work.gets) / SHARES)[pairs % receivers]
    begin = np.array([begin_of(rank) for rank in range(trainers)])
    sent = _sent(sizes, first, count, total, share, begin[pairs // receivers])
    return (
        np.bincount(pairs // receivers, weights=sent, minlength=trainers).astype(np.int64),
        np.bincount(pairs % receivers, weights=sent, minlength=receivers).astype(np.int64),
    )


def messages_of_coordinator(plan: Plan) -> tuple[int, int]:
    """Return the messages that a coordinator sends and receives until everybody may write, and those besides.

    The first are Roster to all, Prepare and Ready for each receiver, Write to all who send; the others Verified and
    Commit for each receiver, Offered, Wrote and Outcome for each trainer.
    """
    receivers = plan.receivers * len(plan.replicas)
    forwards = any((one.senders >= plan.trainers).any() for one in plan.replicas)
    return 2 * plan.trainers + (4 if forwards else 3) * receivers, 3 * plan.trainers + 2 * receivers


def forwarded_messages(plan: Plan, work: Workload) -> tuple[Ints, Ints]:
    """Return the messages that each receiver sends about what it passes on, and those that it receives of such.

    What is passed on comes in small parts, so there are as many as shares, and LAST_MESSAGES more for each pair.
    """
    count, everybody = plan.receivers, len(work.fed)
    sent, received = np.zeros(everybody, np.int64), np.zeros(everybody, np.int64)
    share = np.maximum((work.fed + work.gets) / SHARES, 1.0)
    names = [one.name for one in plan.replicas]
    receiver, size = plan.pieces.receiver[plan.row_piece], plan.piece_bytes[plan.row_piece]
    for number, one in enumerate(plan.replicas):
        rows = np.flatnonzero(one.senders >= plan.trainers)
        outside = one.senders[rows] >= plan.trainers + count
        source = one.senders[rows].astype(np.int64) - plan.trainers - count * outside
        feeder = np.where(outside, 0 if one.parent is None else names.index(one.parent), number)
        pair = (feeder * count + source) * everybody + number * count + receiver[rows]
        pairs, which = np.unique(pair, return_inverse=True)
        total = np.bincount(which.reshape(-1), weights=size[rows], minlength=len(pairs))
        messages = (total // share[pairs % everybody]).astype(np.int64) + LAST_MESSAGES
        sent += np.bincount(pairs // everybody, weights=messages, minlength=everybody).astype(np.int64)
        received += np.bincount(pairs % everybody, weights=messages, minlength=everybody).astype(np.int64)
    return sent, received


def _sent(sizes: Floats, first: Ints, count: Ints, coming: Floats, share: Floats, begin: Floats) -> Ints:
    """Return the messages of each pair, whose units have `count` of the sizes, from the first one on."""
    worth, unsent, coming = share * begin, np.zeros(len(first)), coming.copy()
    sent = np.zeros(len(first), np.int64)
    for unit in range(int(count.max(initial=0))):
        there = unit < count
        size = np.where(there, sizes[np.minimum(first + unit, len(sizes) - 1)], 0.0)
        coming -= size
        unsent += size
        due = there & ((unsent >= worth) | (unsent >= np.maximum(share // LEAST_PART, coming)))
        sent += due
        unsent[due] = 0.0
        worth[due] = share[due]
    return sent + (unsent > 0)
