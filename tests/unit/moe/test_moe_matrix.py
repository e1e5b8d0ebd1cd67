"""Every shape with every kind of routing: each configuration goes through all scenarios, twice, with the same bits.

The experts are functions of their number and of the scales, so a row at a wrong expert is a wrong sum.
"""

from __future__ import annotations

import os
import random
from typing import Any

import anyio
import pytest
import torch
from moe_fixture import MAPPED, Tokens, expected, ranks_of, run_experts, same_bits, tokens_of

import asyncfabric as af
from asyncfabric.moe import MoeConfig, MoeExchange

torch.set_num_threads(1)  # threads that wait for a shared core make it slower

CONFIGURATIONS = int(os.environ.get("ASYNCFABRIC_MOE_CONFIGURATIONS", "10"))
"""Shapes of the matrix; the first ten have every top-k and every dtype, 200 are the long proof."""

HIDDEN = (128, 7168, 512, 1024, 256, 2048, 4096)
DTYPES: tuple[dict[str, Any], ...] = (
    {"in_dtype": "bfloat16", "out_dtype": "bfloat16"},
    {"in_dtype": "float8_e4m3fn", "out_dtype": "bfloat16", "scale_block": 128},
    {"in_dtype": "float32", "out_dtype": "float32"},
    {"in_dtype": "float16", "out_dtype": "float16"},
    {"in_dtype": "float8_e4m3fn", "out_dtype": "float16", "scale_block": 64},
    {"in_dtype": "bfloat16", "out_dtype": "float32"},
    {"in_dtype": "float8_e4m3fn", "out_dtype": "float32"},
)
PLACES: tuple[dict[str, Any], ...] = (
    {"ranks": 3, "num_experts": 11},
    {"ranks": 4, "num_experts": 10, "node_size": 2},
    {"ranks": 2, "num_experts": 13},
    {"ranks": 5, "num_experts": 3},  # ranks without experts
    {"ranks": 1, "num_experts": 7},
    {"ranks": 4, "num_experts": 9, "node_size": 4},
    {"ranks": 6, "num_experts": 17, "node_size": 3},
)
MOST = 6


def configuration(number: int) -> MoeConfig:
    """The first ones go through the lists side by side, later ones draw."""
    draw = random.Random(number)
    drawn = number >= 10
    top_k = draw.randint(1, 10) if drawn else number + 1
    pick: Any = draw.choice if drawn else lambda several: several[number % len(several)]
    return MoeConfig(
        **pick(PLACES),
        **pick(DTYPES),
        hidden=pick(HIDDEN),
        top_k=top_k,
        max_tokens=MOST,
        private_tokens=draw.randint(1, MOST - 1),
        expert_alignment=draw.choice((1, 4, 16)),
    )


def to_one(config: MoeConfig, rank: int, seed: int, count: int, expert: int) -> Tokens:
    """Tokens with no choice but one expert."""
    tokens = tokens_of(config, rank, seed, count, masked=0.0)
    tokens.indices[:] = expert
    return tokens


def scenarios(config: MoeConfig, rank: int) -> list[tuple[str, Tokens]]:
    """What a rank dispatches, step by step."""
    last = config.num_experts - 1
    owner = next(each for each in range(config.ranks) if last in config.experts_of(each))
    sender = (owner + 1) % config.ranks
    brim = config.private
    found = [(f"changing routes {seed}", tokens_of(config, rank, seed)) for seed in range(3)]
    found += [
        ("no tokens on some ranks", tokens_of(config, rank, 3, 0 if rank % 2 else MOST)),
        ("no tokens anywhere", tokens_of(config, rank, 4, 0)),
        ("all tokens to one expert", to_one(config, rank, 5, MOST, last)),
        ("all choices masked", tokens_of(config, rank, 6, MOST, masked=2.0)),
        ("half of the choices masked", tokens_of(config, rank, 7, MOST, masked=0.5)),
        ("exactly the private tokens", to_one(config, rank, 8, brim if rank == sender else 0, last)),
        ("one more than the private tokens", to_one(config, rank, 9, brim + 1 if rank == sender else 0, last)),
    ]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", range(CONFIGURATIONS))
def test_each_shape_goes_through_each_routing_and_repeats_to_the_bit(number: int) -> None:
    config = configuration(number)
    runs: list[dict[tuple[int, str], torch.Tensor]] = [{}, {}]
    for run in runs:

        async def body(moe: MoeExchange, fabric: af.Fabric, run: Any = run) -> None:
            for name, tokens in scenarios(config, moe.rank):
                handle = await moe.dispatch(*tokens)
                result = await moe.combine(run_experts(moe, handle), handle)
                assert same_bits(result, expected(config, moe.rank, tokens)), f"{name}: rank {moe.rank}, {config}"
                run[moe.rank, name] = result
            await in_halves(moe, run)

        anyio.run(lambda body=body: ranks_of(config, body, MAPPED if number % 2 else "local"), backend="trio")
    assert len(runs[0]) == config.ranks * (len(scenarios(config, 0)) + 2)
    assert all(same_bits(result, runs[1][place]) for place, result in runs[0].items())


async def in_halves(moe: MoeExchange, run: dict[tuple[int, str], torch.Tensor]) -> None:
    """Two steps in flight, and the thread computes between all halves."""
    config = moe.config
    batches = [tokens_of(config, moe.rank, 20 + each) for each in range(2)]
    work = torch.randn(64, 64, generator=torch.Generator().manual_seed(moe.rank))
    handles = []
    for tokens in batches:
        handles.append(await moe.dispatch_send(*tokens))
        work = torch.tanh(work @ work)
    for handle in handles:
        await moe.dispatch_recv(handle)
        work = torch.tanh(work @ work)
        await moe.combine_send(run_experts(moe, handle), handle)
        work = torch.tanh(work @ work)
    for number, (handle, tokens) in enumerate(zip(handles, batches, strict=True)):
        result = await moe.combine_recv(handle)
        assert same_bits(result, expected(config, moe.rank, tokens)), f"halves: rank {moe.rank}, {config}"
        run[moe.rank, f"halves {number}"] = result


def test_the_first_shapes_have_every_top_k_dtype_and_width_that_is_promised() -> None:
    first = [configuration(number) for number in range(10)]
    assert {config.top_k for config in first} == set(range(1, 11))
    assert {config.in_dtype for config in first} == {"bfloat16", "float16", "float32", "float8_e4m3fn"}
    assert {config.out_dtype for config in first} == {"bfloat16", "float16", "float32"}
    assert {128, 7168} <= {config.hidden for config in first}
    assert sum(config.num_experts % config.ranks != 0 for config in first) >= 5
    assert {config.node_size > 1 for config in first} == {True, False}
