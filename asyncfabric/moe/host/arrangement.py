"""How arrived rows become what experts work on, and how their outputs become what goes back, for one handle.

Pure functions on the handle, any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asyncfabric._kernels.rows import Span
from asyncfabric.moe.config import MoeConfig
from asyncfabric.moe.host.grouping import Groups, group_rows
from asyncfabric.moe.host.handle import MoeHandle
from asyncfabric.moe.host.loops import row_loops
from asyncfabric.moe.host.record import Bytes, Rows
from asyncfabric.moe.host.sources import Sources


def arranged(config: MoeConfig, rank: int, handle: MoeHandle, about: Rows) -> Groups:
    """Group the arrived rows by expert, and note all about them in the handle."""
    if handle.groups is None:
        groups = group_rows(about.experts, about.weights, config.experts_of(rank), config.expert_alignment)
        handle.sources = Sources(about.origins, groups, config.max_tokens)
        if config.scales:
            zeros = np.zeros((1, config.scales), dtype=np.float32)
            handle.scales = torch.from_numpy(np.concatenate((about.scales, zeros))[groups.row_of])
        handle.groups = groups
    return handle.groups


def filled(handle: MoeHandle, spans: Sequence[Span], places: Sequence[Bytes]) -> None:
    """Put what goes back for the arrived rows of each span into the first rows of its place: the outputs of experts.

    They are weighted and added up in fp32 in the order of choices, and rounded once.
    """
    outputs, groups = handle.outputs, handle.groups
    assert outputs is not None and groups is not None
    rows, kind = outputs
    row_loops().weigh_rows(rows, kind, groups.pair_offsets, groups.position, groups.weights, spans, places)
