"""How arrived rows become what experts work on, and how their outputs become what goes back, for one handle.

Pure functions on the handle, any thread.
"""

from __future__ import annotations

import numpy as np
import torch

from asyncfabric.moe.config import MoeConfig
from asyncfabric.moe.grouping import Groups, group_rows
from asyncfabric.moe.handle import MoeHandle
from asyncfabric.moe.loops import KINDS, as_bytes, row_loops
from asyncfabric.moe.record import Rows


def arranged(config: MoeConfig, rank: int, handle: MoeHandle, about: Rows) -> Groups:
    """Group the arrived rows by expert, and note all about them in the handle."""
    if handle.groups is None:
        groups = group_rows(about.experts, config.experts_of(rank), config.expert_alignment)
        row_of, padding = groups.row_of, groups.row_of < 0
        # Copies: the slots that `about` looks at are used again once the step is combined.
        origins = np.append(about.origins.astype(np.int64), -1)[row_of]
        ranks, tokens = np.divmod(origins, config.max_tokens)
        ranks[padding] = tokens[padding] = -1
        handle.source_ranks, handle.source_tokens = torch.from_numpy(ranks), torch.from_numpy(tokens)
        handle.source_choices = torch.from_numpy(groups.choice_of)
        handle.tokens_per_expert = torch.from_numpy(groups.counts)
        handle.offsets = torch.from_numpy(groups.offsets)
        if config.scales:
            zeros = np.zeros((1, config.scales), dtype=np.float32)
            handle.scales = torch.from_numpy(np.concatenate((about.scales, zeros))[row_of])
        handle.pair_weights = about.weights[groups.pair_row, groups.pair_choice]
        handle.groups = groups
    return handle.groups


def filled(handle: MoeHandle, begin: int, end: int, target: torch.Tensor) -> None:
    """Put what goes back for the arrived rows [begin, end) into `target`: the outputs of their experts.

    They are weighted and added up in fp32 in the order of choices, and rounded once.
    """
    outputs, groups, weights = handle.expert_rows, handle.groups, handle.pair_weights
    assert outputs is not None and groups is not None and weights is not None
    offsets = groups.pair_offsets[begin : end + 1]
    row_loops().weigh_rows(as_bytes(outputs), KINDS[outputs.dtype], offsets, groups.position, weights, as_bytes(target))
