"""Rows and handles of ElasticBuffer of DeepEP's interface, from what a dispatch of Buffer returned.

Runs on the caller's thread; on a GPU the work is put on the current stream, and nothing is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from asyncfabric.integrations.deep_ep.buffer import DispatchHandle
from asyncfabric.integrations.deep_ep.elastic_handle import EPHandle
from asyncfabric.integrations.deep_ep.expansion import (
    by_column,
    ends_of,
    metadata_of,
    origins_of,
    slots_of,
    spread,
    spread_weights,
)
from asyncfabric.integrations.deep_ep.gpu_dispatch import GpuDispatchHandle, Tokens
from asyncfabric.integrations.deep_ep.rows import counts_of


@dataclass(frozen=True)
class LayoutSettings:
    """What a new layout is asked to be.

    Attributes:
        rank: of this process.
        ranks: how many there are.
        num_experts: of all ranks.
        alignment: of the rows of each own expert.
        most: tokens of a rank.
        exact: there are as many rows as came; else as many as may come.
        expanded: rows are by expert.
        num_sms: as given.
    """

    rank: int
    ranks: int
    num_experts: int
    alignment: int
    most: int
    exact: bool
    expanded: bool
    num_sms: int

    @property
    def worst(self) -> int:
        """How many rows may come, or 0 where there are as many as came."""
        return 0 if self.exact else self.ranks * self.most

    def worst_expanded(self, top_k: int) -> int:
        """Return how many rows by expert there may be, with their padding."""
        own = self.num_experts // self.ranks
        rows = self.ranks * self.most * min(top_k, own) + (self.alignment - 1) * own
        return -(-rows // self.alignment) * self.alignment


class ElasticRows(NamedTuple):
    """What a dispatch returns of rows; on the stream that is current."""

    x: torch.Tensor
    scales: torch.Tensor | None
    idx: torch.Tensor | None
    weights: torch.Tensor | None


def new_handle(
    settings: LayoutSettings,
    topk_idx: torch.Tensor,
    recv_idx: torch.Tensor,
    per_expert: list[int],
    step: DispatchHandle | GpuDispatchHandle,
) -> EPHandle:
    """Return the handle of a new layout.

    Args:
        settings: of the layout.
        topk_idx: experts of the own tokens, for the handle.
        recv_idx: experts of the rows that Buffer returned.
        per_expert: how many rows each own expert has, with padding.
        step: the newest of this layout.
    """
    own = settings.num_experts // settings.ranks
    came: int | None = None
    if isinstance(step, DispatchHandle):
        received = step.rows.handle
        assert received is not None and received.source_ranks is not None and received.source_tokens is not None
        ends = torch.bincount(received.source_ranks, minlength=settings.ranks).cumsum(0).int()
        sources, came = received.source_tokens, len(recv_idx)
    else:
        ends, sources = step[0][:, settings.rank].contiguous(), step[1]
    rows = settings.worst or len(recv_idx)
    recv_idx, sources = _filled(recv_idx, rows, -1), _filled(sources, rows, 0)
    counts = counts_of(recv_idx, own)
    slots = slots_of(recv_idx, counts, settings.alignment) if settings.expanded else None
    return EPHandle(
        do_expand=settings.expanded,
        num_experts=settings.num_experts,
        expert_alignment=settings.alignment,
        num_max_tokens_per_rank=settings.most,
        num_sms=settings.num_sms,
        topk_idx=topk_idx,
        num_recv_tokens=rows,
        num_expanded_tokens=sum(per_expert) if settings.exact else settings.worst_expanded(topk_idx.shape[1]),
        num_recv_tokens_per_expert_list=per_expert if settings.exact else [],
        psum_num_recv_tokens_per_scaleup_rank=ends,
        psum_num_recv_tokens_per_expert=ends_of(counts, settings.alignment, expanded=settings.expanded),
        num_unaligned_recv_tokens_per_expert=counts.int(),
        recv_src_metadata=metadata_of(sources, ends, recv_idx, slots, settings.most),
        step=step,
        recv_topk_idx=recv_idx,
        slots=slots,
        came=came,
    )


def check_again(
    handle: EPHandle,
    topk_idx: torch.Tensor | None,
    num_experts: int | None,
    expert_alignment: int | None,
    do_cpu_sync: bool | None,
    do_expand: bool,
) -> None:
    """Raise ValueError for what does not go with a handle."""
    if topk_idx is not None:
        raise ValueError("a dispatch by the layout of a handle takes no topk_idx")
    if do_cpu_sync:
        raise ValueError("do_cpu_sync=True does not go with a handle, whose numbers are known")
    if do_expand and handle.slots is None:
        raise ValueError("do_expand=True needs the handle of a dispatch with do_expand=True")
    for name, value in (("num_experts", num_experts), ("expert_alignment", expert_alignment)):
        if value is not None and value != getattr(handle, name):
            raise ValueError(f"{name} must be {getattr(handle, name)}, that of the handle, got {value}")


def returned_rows(
    received: Tokens,
    weights: torch.Tensor | None,
    scales_dtype: torch.dtype | None,
    handle: EPHandle,
    *,
    expanded: bool,
    by_columns: bool,
) -> ElasticRows:
    """Return what a caller gets of rows that Buffer returned.

    Args:
        received: rows, or rows and scales.
        weights: of their choices; None where none were given.
        scales_dtype: of the scales that were given.
        handle: of the layout.
        expanded: rows are by expert.
        by_columns: scales are in column-major order.
    """
    rows, scales = received if isinstance(received, tuple) else (received, None)
    idx: torch.Tensor | None = None
    if expanded and handle.slots is not None:
        size, slots = handle.num_expanded_tokens, handle.slots[: handle.came]
        origins = origins_of(slots, size)
        rows = spread(rows, origins)
        scales = None if scales is None else spread(scales, origins)
        weights = None if weights is None else spread_weights(weights, slots, size)
    else:
        count = handle.num_recv_tokens
        idx, rows = handle.recv_topk_idx.clone(), _filled(rows, count, 0)
        scales = None if scales is None else _filled(scales, count, 0)
        weights = None if weights is None else _filled(weights, count, 0)
        if handle.came is None and not handle.num_recv_tokens_per_expert_list:  # behind what came lie earlier rows
            filled = handle.psum_num_recv_tokens_per_scaleup_rank[-1]
            rows = _zeros_behind(rows, filled)
            scales = None if scales is None else _zeros_behind(scales, filled)
    if scales is not None and scales_dtype is not None:
        scales = scales.contiguous().view(scales_dtype)
        scales = by_column(scales) if by_columns else scales
    return ElasticRows(rows, scales, idx, weights)


def _zeros_behind(rows: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
    """Return the first `filled` rows, a number on their device, and zeros behind them."""
    wide = rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows
    there = torch.arange(len(rows), dtype=torch.int64, device=rows.device) < filled
    return torch.where(there[:, None], wide, 0).view(rows.dtype)


def _filled(rows: torch.Tensor, count: int, value: int) -> torch.Tensor:
    """Return rows, and behind them so many of one value that they are `count`."""
    if len(rows) == count:
        return rows
    wide = rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows
    return torch.cat([wide, wide.new_full((count - len(rows), *rows.shape[1:]), value)]).view(rows.dtype)
