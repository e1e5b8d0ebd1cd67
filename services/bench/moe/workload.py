"""Workload of `bench moe`: random tokens with random experts that every rank can make from one seed, and the check.

Pure functions over tensors. The expert of the check depends on its number, so a row at a wrong expert shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from asyncfabric.moe import MoeConfig, MoeHandle
from asyncfabric.moe.reference import reference_combine


@dataclass(frozen=True, slots=True)
class TokenLoad:
    """What one rank dispatches in one step; scales only where the config has them."""

    x: torch.Tensor
    indices: torch.Tensor
    weights: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of dispatch."""
        return self.x, self.indices, self.weights, self.scales

    def on(self, device: torch.device) -> TokenLoad:
        """Return the same on a GPU."""
        x, indices, weights = (each.to(device) for each in self.arguments[:3])
        return TokenLoad(x, indices, weights, None if self.scales is None else self.scales.to(device))

    def part(self, some: slice) -> TokenLoad:
        """Return some of the tokens."""
        x, indices, weights = (each[some] for each in self.arguments[:3])
        return TokenLoad(x, indices, weights, None if self.scales is None else self.scales[some])


def tokens_of(config: MoeConfig, rank: int, seed: int) -> TokenLoad:
    """Return the tokens of a rank, `config.max_tokens` of them, each with distinct random experts."""
    random = torch.Generator().manual_seed(seed * 1009 + rank)
    count = config.max_tokens
    x = torch.randn(count, config.hidden, generator=random).to(config.in_torch)
    scores = torch.rand(count, config.num_experts, generator=random)
    indices = scores.topk(config.top_k, dim=1).indices.to(torch.int32)
    weights = torch.rand(count, config.top_k, generator=random)
    scales = torch.rand(count, config.scales, generator=random) + 0.5 if config.scales else None
    return TokenLoad(x, indices, weights, scales)


def expert(
    number: int | torch.Tensor, rows: torch.Tensor, scales: torch.Tensor | None, config: MoeConfig
) -> torch.Tensor:
    """Return what experts make of rows: a multiple that depends on the expert's number, and the scales if any.

    Args:
        number: of the expert, or of that of each row, shape [rows, 1].
        rows: shape [rows, hidden].
        scales: of the rows.
        config: the shape.
    """
    wide = rows.float()
    if scales is not None:
        wide = wide * scales.repeat_interleave(config.scale_block, dim=-1)
    return (wide * (number % 7 - 2.5)).to(config.out_torch)


def run_experts(config: MoeConfig, experts: range, handle: MoeHandle) -> torch.Tensor:
    """Return the outputs of a rank's experts for the rows that came."""
    assert handle.rows is not None and handle.offsets is not None
    outputs = torch.empty(handle.rows.shape, dtype=config.out_torch)
    bounds = handle.offsets.tolist()
    for place, number in enumerate(experts):
        low, high = bounds[place], bounds[place + 1]
        outputs[low:high] = expert(number, handle.rows[low:high], None, config)
    return outputs


def expected(config: MoeConfig, rank: int, tokens: TokenLoad) -> torch.Tensor:
    """Return what combine must give for these tokens, bit for bit."""
    choices = [
        expert(tokens.indices[:, choice, None].float(), tokens.x, tokens.scales, config)
        for choice in range(config.top_k)
    ]
    return reference_combine(config, rank, torch.stack(choices, dim=1), tokens.indices, tokens.weights)
