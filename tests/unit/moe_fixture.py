"""The ranks of an exchange in one process, each with a fabric of its own: what tests of MoE are written in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import anyio
import pytest
import torch

import asyncfabric as af
from asyncfabric.moe import MoeConfig, MoeExchange, MoeGroup, MoeHandle, open_moe
from asyncfabric.moe.reference import reference_combine

PATIENCE_S = 90.0
MAPPED = "local?foreign=cma"
"""A local rail that maps memory of peers of its own process too, as between processes: rows are stored there."""

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")


class Tokens(NamedTuple):
    """What one rank dispatches; also the arguments of dispatch."""

    x: torch.Tensor
    indices: torch.Tensor
    weights: torch.Tensor
    scales: torch.Tensor | None


def tokens_of(config: MoeConfig, rank: int, seed: int, count: int | None = None, masked: float = 0.1) -> Tokens:
    """Random tokens, `count` of them or a random number; some choices are masked, some experts named twice."""
    random = torch.Generator().manual_seed(seed * 1009 + rank)
    if count is None:
        count = int(torch.randint(0, config.max_tokens + 1, (1,), generator=random))
    x = torch.randn(count, config.hidden, generator=random, dtype=torch.float32).to(config.in_torch)
    indices = torch.randint(0, config.num_experts, (count, config.top_k), generator=random)
    indices[torch.rand(count, config.top_k, generator=random, dtype=torch.float32) < masked] = -1
    weights = torch.rand(count, config.top_k, generator=random, dtype=torch.float32) - 0.3
    scales = torch.rand(count, config.scales, generator=random, dtype=torch.float32) + 0.5 if config.scales else None
    return Tokens(x, indices, weights, scales)


def outputs_of(config: MoeConfig, number: int, rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """What an expert makes of rows: it depends on its number and on the scales, element by element."""
    wide = rows.float()
    if scales is not None:
        wide = wide * scales.repeat_interleave(config.scale_block, dim=1)
    return (wide * (number % 11 - 4.25) + number * 0.125).to(config.out_torch)


def run_experts(moe: MoeExchange, handle: MoeHandle) -> torch.Tensor:
    """The experts of a rank; padding becomes NaN, which must go nowhere."""
    assert handle.rows is not None and handle.offsets is not None and handle.tokens_per_expert is not None
    outputs = torch.full(handle.rows.shape, float("nan"), dtype=moe.config.out_torch)
    for place, number in enumerate(moe.experts):
        low = int(handle.offsets[place])
        high = low + int(handle.tokens_per_expert[place])
        scales = None if handle.scales is None else handle.scales[low:high]
        outputs[low:high] = outputs_of(moe.config, number, handle.rows[low:high], scales)
    return outputs


def expected(config: MoeConfig, rank: int, tokens: Tokens, gone: tuple[int, ...] = ()) -> torch.Tensor:
    """What combine must give, bit for bit; experts of the ranks that are gone count as masked."""
    indices = tokens.indices.clone()
    for other in gone:
        experts = config.experts_of(other)
        indices[(indices >= experts.start) & (indices < experts.stop)] = -1
    outputs = torch.zeros(*indices.shape, config.hidden, dtype=config.out_torch)
    for number in range(config.num_experts):
        token, choice = torch.nonzero(indices == number, as_tuple=True)
        scales = None if tokens.scales is None else tokens.scales[token]
        outputs[token, choice] = outputs_of(config, number, tokens.x[token], scales)
    return reference_combine(config, rank, outputs, indices, tokens.weights)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same byte for byte."""
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def grouped_right(config: MoeConfig, rank: int, handle: MoeHandle, everyone: list[Tokens]) -> None:
    """Check the rows of a rank one by one: each choice of its experts once, in order, padding zeros."""
    assert handle.rows is not None and handle.source_ranks is not None and handle.source_tokens is not None
    assert handle.tokens_per_expert is not None and handle.offsets is not None and handle.source_choices is not None
    rows = handle.rows.view(torch.uint8)
    at = 0
    for place, number in enumerate(config.experts_of(rank)):
        assert int(handle.offsets[place]) == at and at % config.expert_alignment == 0
        wanted = [
            (source, int(token), int(choice))
            for source, tokens in enumerate(everyone)
            for token, choice in torch.nonzero(tokens.indices == number).tolist()
        ]
        assert int(handle.tokens_per_expert[place]) == len(wanted)
        for row, (source, token, choice) in enumerate(wanted, at):
            found = (handle.source_ranks[row], handle.source_tokens[row], handle.source_choices[row])
            assert tuple(map(int, found)) == (source, token, choice)
            assert torch.equal(rows[row], everyone[source].x[token].view(torch.uint8))
            if handle.scales is not None:
                assert torch.equal(handle.scales[row], everyone[source].scales[token])  # type: ignore[index]
        end = at + -(-len(wanted) // config.expert_alignment) * config.expert_alignment
        assert not rows[at + len(wanted) : end].any()
        assert (handle.source_ranks[at + len(wanted) : end] == -1).all()
        at = end
    assert at == len(rows) == int(handle.offsets[-1])


async def ranks_of(
    config: MoeConfig,
    body: Callable[[MoeExchange, af.Fabric], Awaitable[None]],
    rail: str | list[str] = MAPPED,
    **options: Any,
) -> None:
    """Open an exchange among fabrics of this process and run `body` for each rank at once."""
    rails = [rail] * config.ranks if isinstance(rail, str) else rail
    with anyio.fail_after(PATIENCE_S):
        async with AsyncExitStack() as stack:
            fabrics = [
                await stack.enter_async_context(af.open_fabric(af.FabricConfig(rails=(each,), **options)))
                for each in rails
            ]
            addresses = [fabric.address for fabric in fabrics]

            async def one(rank: int) -> None:
                async with open_moe(fabrics[rank], MoeGroup(rank, addresses), config) as moe:
                    await body(moe, fabrics[rank])

            async with anyio.create_task_group() as tasks:
                for rank in range(config.ranks):
                    tasks.start_soon(one, rank)


async def right_step(moe: MoeExchange, seed: int, count: int | None = None, masked: float = 0.1) -> torch.Tensor:
    """Do one whole step and check its result bit for bit."""
    tokens = tokens_of(moe.config, moe.rank, seed, count, masked)
    handle = await moe.dispatch(*tokens)
    result = await moe.combine(run_experts(moe, handle), handle)
    assert same_bits(result, expected(moe.config, moe.rank, tokens)), f"rank {moe.rank}, seed {seed}"
    return result
