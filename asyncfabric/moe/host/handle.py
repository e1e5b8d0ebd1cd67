"""MoeHandle: one step of an exchange, from its dispatch to its combine. What users read; no logic.

Runs on the event loop's thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncfabric._kernels.rows import RowBytes
from asyncfabric.moe.host.grouping import Groups
from asyncfabric.moe.host.lane import LaneStep
from asyncfabric.moe.host.record import Bytes
from asyncfabric.moe.host.sources import Sources


@dataclass(slots=True, eq=False)
class MoeHandle:
    """One step. The fields about rows are there once `dispatch_recv` has returned.

    Attributes:
        number: of the step.
        rows: the tokens of all ranks that go to experts of this rank, shape [rows, hidden], grouped by expert in the
            order of experts; within an expert in the order of ranks, then of tokens. Rows of padding are zeros.
        scales: the scales of each row, shape [rows, scales]; None where tokens have none.
    """

    number: int
    epoch: int
    first: LaneStep
    inner: LaneStep | None = None
    crossed: Bytes | None = None
    node_sums: torch.Tensor | None = None
    groups: Groups | None = None
    rows: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    sources: Sources | None = None
    outputs: tuple[RowBytes, int] | None = None
    returned: bool = False
    combined: bool = False

    @property
    def tokens_per_expert(self) -> torch.Tensor | None:
        """Rows of each expert of this rank, without padding, int64."""
        return None if self.groups is None else torch.from_numpy(self.groups.counts)

    @property
    def offsets(self) -> torch.Tensor | None:
        """Row at which each expert begins; the last entry is the number of rows. int64."""
        return None if self.groups is None else torch.from_numpy(self.groups.offsets)

    @property
    def row_weights(self) -> torch.Tensor | None:
        """The routing weight of each row, 0 for padding. Shape [rows], float32."""
        if self.groups is None:
            return None
        weights = torch.zeros(int(self.groups.offsets[-1]), dtype=torch.float32)
        weights[torch.from_numpy(self.groups.position)] = torch.from_numpy(self.groups.weights)
        return weights

    @property
    def source_ranks(self) -> torch.Tensor | None:
        """For each row the rank that it came from, -1 for padding. Shape [rows], int64."""
        return None if self.sources is None else self.sources.ranks

    @property
    def source_tokens(self) -> torch.Tensor | None:
        """For each row which token of that rank it is, -1 for padding. Shape [rows], int64."""
        return None if self.sources is None else self.sources.tokens

    @property
    def source_choices(self) -> torch.Tensor | None:
        """For each row which of the token's top-k choices it is, -1 for padding. Shape [rows], int64."""
        return None if self.sources is None else self.sources.choices
