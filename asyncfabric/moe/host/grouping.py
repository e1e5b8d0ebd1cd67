"""How the rows that arrived are grouped by expert: a counting sort in the compiled loops, whatever their number.

Pure functions, any thread. Knows neither memory nor peers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from asyncfabric.moe.host.loops import row_loops
from asyncfabric.moe.host.record import Floats
from asyncfabric.moe.host.routing import Experts, Ints


class Groups(NamedTuple):
    """Rows grouped by expert. A pair is one row together with one expert that it goes to.

    Attributes:
        counts: rows of each expert, without padding.
        offsets: where each expert's rows begin; the last entry is the number of rows with padding.
        row_of: for each output row the row it is a copy of, -1 for padding.
        choice_of: for each output row which of the row's top-k choices it serves, -1 for padding.
        pair_offsets: where the pairs of each row begin in `position`; one more entry ends the last.
        position: for each pair its output row; pairs in the order of rows, then of choices.
        weights: for each pair its routing weight.
    """

    counts: Ints
    offsets: Ints
    row_of: Ints
    choice_of: Ints
    pair_offsets: Ints
    position: Ints
    weights: Floats


def group_rows(indices: Experts, weights: Floats, experts: range, alignment: int) -> Groups:
    """Group rows by the experts of one rank; within an expert they keep their order.

    Args:
        indices: experts of each row, shape [rows, top_k], contiguous; those outside `experts` and -1 are none of this
            rank.
        weights: their routing weights, same shape.
        experts: the experts of this rank.
        alignment: each expert's rows begin at a multiple of it.
    """
    counts, offsets = np.empty(len(experts), dtype=np.int64), np.empty(len(experts) + 1, dtype=np.int64)
    pair_offsets = np.empty(len(indices) + 1, dtype=np.int64)
    pairs = row_loops().count_pairs(indices, experts.start, alignment, counts, offsets, pair_offsets)
    position, pair_weights = np.empty(pairs, dtype=np.int64), np.empty(pairs, dtype=np.float32)
    row_of, choice_of = np.empty((2, int(offsets[-1])), dtype=np.int64)
    row_loops().place_pairs(indices, weights, experts.start, offsets, position, pair_weights, row_of, choice_of)
    return Groups(counts, offsets, row_of, choice_of, pair_offsets, position, pair_weights)
