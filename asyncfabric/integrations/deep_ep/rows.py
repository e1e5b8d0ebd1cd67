"""How rows, and what they are about, lie in the tensors of DeepEP's interface. Pure functions, any thread."""

from __future__ import annotations

from typing import NamedTuple

import torch

from asyncfabric.moe import MoeHandle


class Layout(NamedTuple):
    """Where tokens go.

    Attributes:
        tokens_per_rank: shape [ranks], int32.
        tokens_per_expert: shape [experts], int32.
        is_token_in_rank: shape [tokens, ranks], bool.
    """

    tokens_per_rank: torch.Tensor
    tokens_per_expert: torch.Tensor
    is_token_in_rank: torch.Tensor


def layout_of(topk_idx: torch.Tensor, num_experts: int, ranks: int) -> Layout:
    """Return where tokens with these experts go, shape [tokens, top_k], -1 for none.

    On a GPU nothing is asked: there an expert that does not exist counts as none.

    Raises:
        ValueError: experts that do not divide by the ranks, or that do not exist.
    """
    own = experts_of_rank(num_experts, ranks)
    if not topk_idx.is_cuda and topk_idx.numel() and not -1 <= int(topk_idx.min()) <= int(topk_idx.max()) < num_experts:
        low, high = int(topk_idx.min()), int(topk_idx.max())
        raise ValueError(f"topk_idx must be in -1..{num_experts - 1}, got {low}..{high}")
    chosen = torch.where((topk_idx >= 0) & (topk_idx < num_experts), topk_idx, num_experts).long()
    per_expert = torch.zeros(num_experts + 1, dtype=torch.int32, device=topk_idx.device)
    per_expert.scatter_add_(0, chosen.reshape(-1), torch.ones_like(chosen, dtype=torch.int32).reshape(-1))
    per_expert = per_expert[:num_experts].contiguous()
    in_rank = torch.zeros(len(topk_idx), ranks + 1, dtype=torch.bool, device=topk_idx.device)
    in_rank.scatter_(1, chosen // own, True)
    in_rank = in_rank[:, :ranks].contiguous()
    return Layout(in_rank.sum(0).int(), per_expert, in_rank)


def experts_of_rank(num_experts: int, ranks: int) -> int:
    """Return how many experts each rank has; raises ValueError where ranks would have different numbers."""
    if num_experts % ranks:
        raise ValueError(f"num_experts must be a multiple of the {ranks} ranks, got {num_experts}")
    return num_experts // ranks


def counts_of(recv_idx: torch.Tensor, own: int) -> torch.Tensor:
    """Return how many rows each of `own` experts has, int64, from the experts of rows, -1 for none."""
    places = torch.where(recv_idx >= 0, recv_idx, own).reshape(-1)
    counts = torch.zeros(own + 1, dtype=torch.int64, device=recv_idx.device)
    return counts.scatter_add_(0, places, torch.ones_like(places))[:own]


def check_choices(tokens: int, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None = None) -> None:
    """Raise ValueError unless each of so many tokens has its choices, and weights as many as choices."""
    if topk_idx.dim() != 2 or len(topk_idx) != tokens:
        raise ValueError(f"topk_idx must have the shape [{tokens}, top_k], got {list(topk_idx.shape)}")
    if topk_weights is not None and topk_weights.shape != topk_idx.shape:
        expected, got = list(topk_idx.shape), list(topk_weights.shape)
        raise ValueError(f"topk_weights must have the shape of topk_idx, {expected}, got {got}")


def about_width(top_k: int) -> int:
    """Return the elements of a row of experts and weights."""
    return -(-2 * top_k // 16) * 16


def about_rows(topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """Return experts and weights as rows, shape [tokens, about_width] in float32: weights, then the experts' bits."""
    count, top_k = topk_idx.shape
    rows = torch.zeros(count, about_width(top_k), dtype=torch.float32)
    rows[:, :top_k] = topk_weights
    rows.view(torch.int32)[:, top_k : 2 * top_k] = topk_idx.int()
    return rows


def read_about(rows: torch.Tensor, top_k: int, experts: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what arrived rows state: experts counted from the first own one, int64, and weights, float32.

    Those of experts of other ranks are -1 and 0: a weight counts at one rank, so that sums over ranks have it once.
    """
    chosen = rows.view(torch.int32)[:, top_k : 2 * top_k].long()
    own = (chosen >= experts.start) & (chosen < experts.stop)
    return torch.where(own, chosen - experts.start, -1), rows[:, :top_k].masked_fill(~own, 0.0)


Bias = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


def with_biases(sums: torch.Tensor, bias: Bias) -> torch.Tensor:
    """Return sums with biases added in fp32, rounded once more."""
    if bias is None:
        return sums
    wide = sums.float()
    for each in bias if isinstance(bias, tuple) else (bias,):
        wide += each.float()
    return wide.to(sums.dtype)


class Slots:
    """The tensors of a low-latency dispatch: a slot for each row that an expert may get."""

    def __init__(self, experts: int, ranks: int, each: int, hidden: int, dtype: torch.dtype, scales: int) -> None:
        """Make room for `each` tokens of every rank at every one of `experts`."""
        self.each: int = each
        self.ranks: int = ranks
        self.x: torch.Tensor = torch.zeros(experts, ranks * each, hidden, dtype=dtype)
        # The last two dimensions are in column-major order, as callers' matrix libraries want them.
        self.scales: torch.Tensor = torch.zeros(experts, scales, ranks * each, dtype=torch.float32).transpose(1, 2)
        self.count: torch.Tensor = torch.zeros(experts, dtype=torch.int32)
        self.source: torch.Tensor = torch.zeros(experts, ranks * each, dtype=torch.int32)
        self.range: torch.Tensor = torch.zeros(experts, ranks, dtype=torch.int64)

    def fill(self, handle: MoeHandle, top_k: int) -> None:
        """Put the rows of a received step into their slots."""
        assert handle.rows is not None and handle.offsets is not None and handle.tokens_per_expert is not None
        assert handle.source_ranks is not None and handle.source_tokens is not None
        self.count.copy_(handle.tokens_per_expert)
        for expert, (low, count) in enumerate(
            zip(handle.offsets.tolist()[:-1], handle.tokens_per_expert.tolist(), strict=True)
        ):
            if count > self.ranks * self.each:
                raise ValueError(f"expert {expert} got {count} rows; a token may name an expert once")
            self.x[expert, :count] = handle.rows[low : low + count]
            if handle.scales is not None:
                self.scales[expert, :count] = handle.scales[low : low + count]
            self.source[expert, :count] = (handle.source_tokens[low : low + count] // top_k).int()
            counts = torch.bincount(handle.source_ranks[low : low + count], minlength=self.ranks)
            self.range[expert] = ((counts.cumsum(0) - counts) << 32) | counts

    def rows_of(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs in their slots as the rows of the step."""
        counts = self.count.tolist()
        return torch.cat([outputs[expert, :count] for expert, count in enumerate(counts)])


def weighted_sums(
    outputs: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return for each token the weighted sum of its choices' outputs, in fp32 and the order of choices, rounded once.

    Args:
        outputs: shape [tokens * top_k, hidden].
        topk_idx: shape [tokens, top_k]; choices of -1 count nothing.
        topk_weights: same shape, float32.
        dtype: of the result.
    """
    count, top_k = topk_idx.shape
    choices = outputs.view(count, top_k, outputs.shape[1])
    weights = topk_weights.masked_fill(topk_idx < 0, 0.0)
    sums = torch.zeros(count, outputs.shape[1], dtype=torch.float32)
    for choice in range(top_k):
        sums += choices[:, choice].float() * weights[:, choice, None]
    return sums.to(dtype)
