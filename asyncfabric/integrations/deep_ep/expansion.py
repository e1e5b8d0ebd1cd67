"""Rows by expert, as ElasticBuffer of DeepEP's interface returns them: where each row goes, and the way back.

Pure functions; on a GPU nothing is asked, so that they can be captured. A slot is a place in the rows by expert: those
of an expert follow each other, in the order of rows, and each expert's begin at a multiple of the alignment.
"""

from __future__ import annotations

import torch


def ends_of(counts: torch.Tensor, alignment: int, *, expanded: bool) -> torch.Tensor:
    """Return where each expert's rows end, int32 [experts]; of rows by expert without the padding of the last.

    Args:
        counts: rows of each expert, int64.
        alignment: of the experts' rows.
        expanded: whether the padding of an expert itself is left out of its end.
    """
    aligned = _aligned(counts, alignment)
    ends = aligned.cumsum(0)
    return (ends - aligned + counts if expanded else ends).int()


def slots_of(recv_idx: torch.Tensor, counts: torch.Tensor, alignment: int) -> torch.Tensor:
    """Return the slot of each choice of each row, int64 [rows, top_k], -1 for choices of none.

    Args:
        recv_idx: experts of each row, counted from the first of this rank, -1 for none.
        counts: rows of each expert, int64.
        alignment: of the experts' rows.
    """
    own = len(counts)
    experts = torch.where(recv_idx >= 0, recv_idx, own).reshape(-1)
    chosen, order = torch.sort(experts, stable=True)
    begins = _with_end(_aligned(counts, alignment)) - _with_end(counts)
    place = torch.arange(len(experts), dtype=torch.int64, device=experts.device)
    slots = torch.where(chosen < own, begins[chosen] + place, -1)
    return torch.empty_like(slots).scatter_(0, order, slots).view(recv_idx.shape)


def origins_of(slots: torch.Tensor, size: int) -> torch.Tensor:
    """Return the row of each of `size` slots, int64, -1 for padding."""
    rows = torch.arange(len(slots), dtype=torch.int64, device=slots.device)
    origins = torch.full((size + 1,), -1, dtype=torch.int64, device=slots.device)
    return origins.scatter_(0, _or_last(slots, size), rows[:, None].expand(slots.shape).reshape(-1))[:size]


def spread(rows: torch.Tensor, origins: torch.Tensor) -> torch.Tensor:
    """Return the rows in their slots, zeros in padding."""
    if not len(rows):
        return rows.new_zeros(len(origins), *rows.shape[1:])
    wide = rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows
    return wide.index_select(0, origins.clamp(min=0)).masked_fill_((origins < 0)[:, None], 0).view(rows.dtype)


def spread_weights(weights: torch.Tensor, slots: torch.Tensor, size: int) -> torch.Tensor:
    """Return the weights of choices, [rows, top_k], in their slots, [size], zeros in padding."""
    made = torch.zeros(size + 1, dtype=weights.dtype, device=weights.device)
    return made.scatter_(0, _or_last(slots, size), weights.reshape(-1))[:size]


def folded(x: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return for each row the sum of what is in its slots, in fp32 and the order of choices, rounded once."""
    sums = torch.zeros(len(slots), x.shape[1], dtype=torch.float32, device=x.device)
    if len(x):
        for taken in slots.unbind(1):
            sums += torch.where(taken[:, None] >= 0, x.index_select(0, taken.clamp(min=0)).float(), 0.0)
    return sums.to(dtype)


def folded_weights(weights: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the weights in slots, [size], as those of choices, [rows, top_k], 0 for choices of none."""
    if not len(weights):
        return weights.new_zeros(slots.shape)
    taken = weights.index_select(0, slots.clamp(min=0).reshape(-1)).view(slots.shape)
    return torch.where(slots >= 0, taken, 0.0)


def metadata_of(
    source_tokens: torch.Tensor, ends: torch.Tensor, recv_idx: torch.Tensor, slots: torch.Tensor | None, most: int
) -> torch.Tensor:
    """Return int32 [rows, 2 + top_k]: source rank * most + token; source rank * top_k + first own choice; slots.

    Rows that did not come, and slots where there are none, are -1.

    Args:
        source_tokens: number of each row's token at its source.
        ends: where the rows of each source rank end.
        recv_idx: experts of each row, counted from the first of this rank, -1 for none.
        slots: of each choice; None: rows are not by expert.
        most: tokens of a rank.
    """
    count, top_k = recv_idx.shape
    rows = torch.arange(count, dtype=ends.dtype, device=ends.device)
    ranks = torch.bucketize(rows, ends, right=True)
    made = torch.full((count, 2 + top_k), -1, dtype=torch.int32, device=ends.device)
    there = rows < ends[-1]
    made[:, 0] = torch.where(there, ranks * most + source_tokens, -1)
    made[:, 1] = torch.where(there, ranks * top_k + (recv_idx >= 0).int().argmax(1), -1)
    if slots is not None:
        made[:, 2:] = slots
    return made


def by_column(scales: torch.Tensor) -> torch.Tensor:
    """Return scales as they are, in column-major order with columns of a multiple of four elements of 4 bytes."""
    rows, columns = scales.shape
    strides = (1, -(-rows // 4) * 4)
    return torch.empty_strided((rows, columns), strides, dtype=scales.dtype, device=scales.device).copy_(scales)


def _aligned(counts: torch.Tensor, alignment: int) -> torch.Tensor:
    return (counts + alignment - 1).div(alignment, rounding_mode="floor") * alignment


def _with_end(counts: torch.Tensor) -> torch.Tensor:
    """Return where each begins, and where the last ends."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _or_last(slots: torch.Tensor, size: int) -> torch.Tensor:
    return torch.where(slots >= 0, slots, size).reshape(-1)
