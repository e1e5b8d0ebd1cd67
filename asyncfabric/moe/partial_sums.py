"""What goes back for a row: the outputs of its experts, weighted and added up in fp32 in the order of its choices.

Pure functions over tensors, any thread.
"""

from __future__ import annotations

import numpy as np
import torch

from asyncfabric.moe.backward import BLOCK_ELEMENTS
from asyncfabric.moe.record import Floats
from asyncfabric.moe.routing import Groups


def add_outputs(
    outputs: torch.Tensor, groups: Groups, weights: Floats, begin: int, end: int, target: torch.Tensor
) -> None:
    """Put the weighted sums of rows [begin, end) into `target`, rounded once to its dtype.

    Args:
        outputs: of the experts, shape [rows with padding, hidden], grouped as `groups` says.
        groups: how rows were grouped.
        weights: of each row's choices, shape [rows, top_k].
        begin: first row.
        end: end of the rows.
        target: shape [end - begin, hidden].
    """
    each = max(16, BLOCK_ELEMENTS // outputs.shape[1])
    for low in range(begin, end, each):
        high = min(low + each, end)
        first = groups.pair_offsets[low:high]
        pairs = groups.pair_offsets[low + 1 : high + 1] - first
        sums = _weighted(outputs, groups, weights, np.arange(low, high), first)
        for choice in range(1, int(pairs.max())):
            more = np.flatnonzero(pairs > choice)
            added = _weighted(outputs, groups, weights, more + low, first[more] + choice)
            if len(more) == high - low:
                sums += added
            else:
                sums[more] += added
        target[low - begin : high - begin] = torch.from_numpy(sums)


def _weighted(
    outputs: torch.Tensor,
    groups: Groups,
    weights: Floats,
    rows: np.ndarray[tuple[int], np.dtype[np.int64]],
    pairs: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> Floats:
    """Return one pair's output of each row times its weight, in fp32; multiplied first, rounded, and added later."""
    picked = outputs.index_select(0, torch.from_numpy(groups.position[pairs])).float().numpy()
    picked *= weights[rows, groups.pair_choice[pairs]][:, None]
    return picked
