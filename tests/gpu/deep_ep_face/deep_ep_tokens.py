"""What each rank of a test of DeepEP's interface on GPUs sends; every rank knows it of all."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from nvlink_fixture import same_bits

from asyncfabric.integrations.deep_ep import topk_idx_t

EXPERTS, HIDDEN, MOST, MOST_TOKENS = 12, 512, 24, 64


class DeepEpTokens(NamedTuple):
    """Tokens of a rank, on its host."""

    x: torch.Tensor
    idx: torch.Tensor
    weights: torch.Tensor


def given_by(
    rank: int,
    seed: int,
    top_k: int,
    dtype: torch.dtype = torch.bfloat16,
    empty: int = -1,
    *,
    hidden: int = HIDDEN,
    most: int = MOST,
) -> DeepEpTokens:
    """Return random tokens of a rank, none of rank `empty`; experts of a token differ, some choices are masked."""
    draws = torch.Generator().manual_seed(1009 * seed + rank)
    count = 0 if rank == empty else int(torch.randint(1, most + 1, (1,), generator=draws))
    x = torch.randn(count, hidden, generator=draws).to(dtype)
    idx = torch.rand(count, EXPERTS, generator=draws).topk(top_k, dim=1)[1].to(topk_idx_t)
    idx[torch.rand(count, top_k, generator=draws) < 0.15] = -1
    return DeepEpTokens(x, idx, torch.rand(count, top_k, generator=draws) - 0.3)


def meet(buffer: Any) -> None:
    """Wait for all ranks."""
    buffer._room.gathered(None)


def settle() -> None:
    """Wait for this rank's stream: kernels of others on the GPU may wait for what this one launches next."""
    torch.cuda.current_stream().synchronize()


def in_ranks(idx: torch.Tensor, ranks: int) -> torch.Tensor:
    own = EXPERTS // ranks
    return torch.stack([((idx >= 0) & (idx // own == each)).any(1) for each in range(ranks)], 1)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return not one.numel() or same_bits(one.contiguous(), other.contiguous())
