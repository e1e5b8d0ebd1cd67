"""Which receivers of a node want equal bytes: the pieces of each family, found once for all replicas. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from asyncfabric.weights.boxes import Ints


class Families(NamedTuple):
    """Pieces of one kind with equal boxes whose receivers share a node.

    Attributes:
        leader: for each piece the first piece of its family.
        group: for leaders the number of the family's set of receivers in `groups`; -1 for other pieces.
        groups: distinct sets of receivers.
    """

    leader: Ints
    group: Ints
    groups: list[tuple[int, ...]]


def families(kind: Ints, twin: Ints, receiver: Ints, node_ranks: int) -> Families:
    """Return the families of pieces, given the kind, twin and receiver of each; see `geometry.Pieces`."""
    count = len(kind)
    node = receiver // node_ranks
    order = np.lexsort((receiver, node, twin, kind))
    columns = np.stack([kind[order], twin[order], node[order]])
    begins = (
        np.flatnonzero(np.concatenate([[True], (np.diff(columns) != 0).any(axis=0)])) if count else np.zeros(0, int)
    )
    leader = np.empty(count, np.int64)
    leader[order] = np.repeat(order[begins], np.diff([*begins.tolist(), count]))
    return Families(leader, *_groups(order, begins, receiver))


def _groups(order: Ints, begins: Ints, receiver: Ints) -> tuple[Ints, list[tuple[int, ...]]]:
    group = np.full(len(order), -1, np.int64)
    known: dict[tuple[int, ...], int] = {}
    everyone: Sequence[int] = receiver[order].tolist()
    firsts = order[begins].tolist()
    bounds = [*begins.tolist(), len(order)]
    for first, begin, end in zip(firsts, bounds[:-1], bounds[1:], strict=True):
        group[first] = known.setdefault(tuple(everyone[begin:end]), len(known))
    return group, list(known)
