"""Workload of `bench moe`: random tokens with random experts that every rank can make from one seed, and the check.

Pure functions over tensors. The expert of the check depends on its number, so a row at a wrong expert shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncfabric.moe import MoeConfig, MoeHandle
from asyncfabric.moe.reference import reference_combine


@dataclass(frozen=True, slots=True)
class Tokens:
    """What one rank dispatches in one step."""

    x: torch.Tensor
    indices: torch.Tensor
    weights: torch.Tensor


def tokens_of(config: MoeConfig, rank: int, seed: int) -> Tokens:
    """Return the tokens of a rank, `config.max_tokens` of them, each with distinct random experts."""
    random = torch.Generator().manual_seed(seed * 1009 + rank)
    count = config.max_tokens
    x = torch.randn(count, config.hidden, generator=random).to(config.in_torch)
    scores = torch.rand(count, config.num_experts, generator=random)
    indices = scores.topk(config.top_k, dim=1).indices.to(torch.int32)
    return Tokens(x, indices, torch.rand(count, config.top_k, generator=random))


def expert(number: int, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what an expert makes of rows: a multiple that depends on its number."""
    return (rows.float() * (number % 7 - 2.5)).to(dtype)


def run_experts(config: MoeConfig, experts: range, handle: MoeHandle) -> torch.Tensor:
    """Return the outputs of a rank's experts for the rows that came."""
    assert handle.rows is not None and handle.offsets is not None
    outputs = torch.empty(handle.rows.shape, dtype=config.out_torch)
    bounds = handle.offsets.tolist()
    for place, number in enumerate(experts):
        low, high = bounds[place], bounds[place + 1]
        outputs[low:high] = expert(number, handle.rows[low:high], config.out_torch)
    return outputs


def expected(config: MoeConfig, rank: int, tokens: Tokens) -> torch.Tensor:
    """Return what combine must give for these tokens, bit for bit."""
    factors = tokens.indices.float() % 7 - 2.5
    outputs = (tokens.x.float()[:, None, :] * factors[:, :, None]).to(config.out_torch)
    return reference_combine(config, rank, outputs, tokens.indices, tokens.weights)
