"""What goes back for a row: the outputs of its experts, weighted and added up in fp32 in the order of its choices.

Pure functions over tensors, any thread. Works in blocks that stay in a core's cache, in memory that is kept: fresh
pages would cost more than the sums. Each product is rounded before it is added, so that no machine fuses the two.
"""

from __future__ import annotations

import threading

import numpy as np
import torch

from asyncfabric.moe.record import Floats
from asyncfabric.moe.routing import Groups

BLOCK_ELEMENTS = 1 << 17


class Scratch(threading.local):
    """Memory for one block, of each thread; grows to what was asked for last."""

    picked: torch.Tensor = torch.empty(0)
    wide: torch.Tensor = torch.empty(0)
    sums: torch.Tensor = torch.empty(0)

    def fit(self, rows: int, width: int, dtype: torch.dtype) -> None:
        """Make room for blocks of this shape."""
        if self.picked.shape != (rows, width) or self.picked.dtype != dtype:
            self.picked = torch.empty((rows, width), dtype=dtype)
            self.wide = torch.empty((rows, width))
            self.sums = torch.empty((rows, width))


scratch: Scratch = Scratch()


def block_rows(width: int) -> int:
    """Return how many rows of this width make a block."""
    return max(16, BLOCK_ELEMENTS // width)


def add_outputs(
    outputs: torch.Tensor, groups: Groups, pair_weights: Floats, begin: int, end: int, target: torch.Tensor
) -> None:
    """Put the weighted sums of rows [begin, end) into `target`, rounded once to its dtype.

    Args:
        outputs: of the experts, shape [rows with padding, hidden], grouped as `groups` says.
        groups: how rows were grouped; each row has at least one pair.
        pair_weights: the weight of each pair.
        begin: first row.
        end: end of the rows.
        target: shape [end - begin, hidden], of the dtype of `outputs`.
    """
    width = outputs.shape[1]
    each = block_rows(width)
    scratch.fit(each, width, outputs.dtype)
    for low in range(begin, end, each):
        high = min(low + each, end)
        first = groups.pair_offsets[low:high]
        pairs = groups.pair_offsets[low + 1 : high + 1] - first
        most, least = int(pairs.max()), int(pairs.min())
        place = target[low - begin : high - begin]
        if most == least:
            place.copy_(_block_sums(outputs, groups, pair_weights, first, [high - low] * most))
            continue
        # Rows with many pairs first: then each further pair is added to the first rows of the block, without a gather.
        order = np.argsort(-pairs, kind="stable")
        longer = [int(np.count_nonzero(pairs > number)) for number in range(most)]
        sums = _block_sums(outputs, groups, pair_weights, first[order], longer)
        rounded = scratch.picked[: high - low]
        rounded.copy_(sums)
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        torch.index_select(rounded, 0, torch.from_numpy(back), out=place)  # far faster than index_copy_


def _block_sums(
    outputs: torch.Tensor,
    groups: Groups,
    pair_weights: Floats,
    first: np.ndarray[tuple[int], np.dtype[np.int64]],
    longer: list[int],
) -> torch.Tensor:
    """Return the sums of the rows whose pairs begin at `first`; of them, the first `longer[n]` have an n-th pair."""
    sums = scratch.sums[: longer[0]]
    for number, rows in enumerate(longer):
        pair = first[:rows] + number
        picked = scratch.picked[:rows]
        torch.index_select(outputs, 0, torch.from_numpy(groups.position[pair]), out=picked)
        wide = scratch.wide[:rows] if number else sums
        wide.copy_(picked)
        wide.mul_(torch.from_numpy(pair_weights[pair])[:, None])
        if number:
            sums[:rows].add_(wide)
    return sums
