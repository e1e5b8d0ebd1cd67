"""Ranks on different hosts, as far as they know: parcels in pinned memory, carried by a proxy, right to the bit."""

from __future__ import annotations

import os
import time
from typing import Any

import anyio
import pytest
import torch
from nvlink_fixture import ONE_LOOP, Cast, cast_of, expected, same_bits, tokens_of
from nvlink_rank import DEADLINE_S, ranks_of
from test_nvlink_moe import replay

from asyncfabric.moe import MissingRankError, MoeConfig

pytestmark = pytest.mark.anyio

STEPS = int(os.environ.get("ASYNCFABRIC_MOE_STEPS", "200"))
RAILS = os.environ.get("ASYNCFABRIC_MOE_RAILS", "local").split(",")
"""tcp runs when asked for: a machine with GPUs may have no libfabric."""
SMALL: dict[str, Any] = {"num_experts": 10, "top_k": 4, "hidden": 128, "max_tokens": 24, "ranks": 2}
FP8: dict[str, Any] = {"in_dtype": "float8_e4m3fn", "scale_block": 64, "expert_alignment": 8}
CASES: list[tuple[dict[str, Any], list[int]]] = [
    ({}, [0, 1]),
    (FP8, [0, 1]),
    ({"private_tokens": 3}, [0, 1]),
    (FP8 | {"private_tokens": 0, "in_flight": 1}, [0, 1]),
    ({"ranks": 4}, [0, 1, 2, 3]),
    (FP8 | {"ranks": 4}, [0, 0, 1, 1]),
    ({"ranks": 4, "in_flight": 4, "private_tokens": 9}, [0, 1, 0, 1]),
    ({"ranks": 4, "in_dtype": "float32", "out_dtype": "float32"}, [0, 0, 0, 1]),
    ({"hidden": 7168, "top_k": 8, "num_experts": 256}, [0, 1]),
    ({"hidden": 16384, "in_dtype": "float32", "out_dtype": "float16"}, [0, 1]),
    ({"ranks": 3, "num_experts": 1023, "top_k": 32, "max_tokens": 300, "in_flight": 1}, [0, 1, 1]),
]


def named(case: tuple[dict[str, Any], list[int]]) -> str:
    """Return a case in a word."""
    shape, hosts = case
    return "-".join([*(f"{key}={value}" for key, value in shape.items()), "".join(map(str, hosts))])


@pytest.mark.parametrize("rail", RAILS)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize("case", CASES, ids=named)
async def test_sums_are_those_of_the_reference(case: tuple[dict[str, Any], list[int]], split: bool, rail: str) -> None:
    shape, hosts = case
    async with cast_of(MoeConfig(**(SMALL | shape)), hosts=hosts, rail=rail) as cast:
        for seed in range(4):
            await cast.right_step(seed, split=split)


@pytest.mark.parametrize("counts", [(0, 0), (0, 24), (24, 0), (1, 24)])
async def test_ranks_without_tokens(counts: tuple[int, ...]) -> None:
    config = MoeConfig(**SMALL)
    async with cast_of(config, hosts=[0, 1]) as cast:
        for seed in range(3):
            everyone = [tokens_of(config, rank, seed, count) for rank, count in enumerate(counts)]
            for rank, out in enumerate(await cast.step(everyone)):
                assert same_bits(out, expected(config, rank, everyone[rank]))


async def test_all_tokens_to_one_expert_and_all_masked() -> None:
    config = MoeConfig(**(SMALL | {"private_tokens": 7}))
    async with cast_of(config, hosts=[0, 1]) as cast:
        for number in (0, 9, -1):
            everyone = [tokens_of(config, rank, number + 1, 24) for rank in range(2)]
            for tokens in everyone:
                tokens.indices[:] = number
            for rank, out in enumerate(await cast.step(everyone)):
                assert same_bits(out, expected(config, rank, everyone[rank]))


@pytest.mark.parametrize("rail", RAILS)
async def test_many_steps_with_changing_routes(rail: str) -> None:
    config = MoeConfig(**(SMALL | FP8 | {"private_tokens": 12}))
    async with cast_of(config, hosts=[0, 1], rail=rail) as cast:
        for seed in range(STEPS):
            await cast.right_step(seed, split=seed % 3 == 0, check_rows=seed % 10 == 0)


@pytest.mark.parametrize(("ranks", "hosts"), [(2, [0, 1]), (4, [0, 0, 1, 1])])
async def test_a_graph_replayed_with_changing_routes(ranks: int, hosts: list[int]) -> None:
    config = MoeConfig(**(SMALL | {"ranks": ranks, "private_tokens": 16}))
    async with cast_of(config, hosts=hosts) as cast:
        sets = [[tokens_of(config, rank, seed, 24) for rank in range(ranks)] for seed in range(8)]
        right = [[expected(config, rank, each[rank]) for rank in range(ranks)] for each in sets]
        await replay(cast, sets, right, STEPS)


@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
async def test_a_rank_that_does_not_come_is_named_and_the_others_go_on() -> None:
    """Rank 1 is there but stays away from a step: its peers on either host name it, and go on with the mask."""
    config = MoeConfig(**(SMALL | {"ranks": 3}))
    async with cast_of(config, deadline_s=3.0, hosts=[0, 1, 1]) as cast:
        await cast.right_step(0)
        everyone = [tokens_of(config, rank, 1, 24) for rank in range(3)]
        given = [tokens.on(moe.device) for tokens, moe in zip(everyone, cast.ranks, strict=True)]
        await cast.settle()
        for rank in (0, 2):
            with torch.cuda.stream(cast.streams[rank]):
                cast.ranks[rank].dispatch(*given[rank])
        for rank in (0, 2):
            with torch.cuda.stream(cast.streams[rank]), pytest.raises(MissingRankError, match="rank 1") as found:
                await cast.ranks[rank].settled()
            assert found.value.ranks == (1,) and found.value.lost
        async with anyio.create_task_group() as tasks:
            for rank in (0, 2):
                tasks.start_soon(cast.ranks[rank].exclude, [1])
        left = Cast([cast.ranks[0], cast.ranks[2]], [cast.streams[0], cast.streams[2]])
        for seed in range(3):
            everyone = [tokens_of(config, rank, seed, 24) for rank in (0, 2)]
            for moe, tokens, out in zip(left.ranks, everyone, await left.step(everyone, check_rows=False), strict=True):
                assert same_bits(out, expected(config, moe.rank, tokens, gone=(1,)))


SHAPE: dict[str, Any] = {"num_experts": 10, "top_k": 4, "hidden": 1024, "max_tokens": 64}


def devices(ranks: int, gpus: int) -> list[str]:
    """Return GPUs for ranks, by turns."""
    return [f"cuda:{rank % min(gpus, torch.cuda.device_count())}" for rank in range(ranks)]


@pytest.mark.parametrize("rail", RAILS)
@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("dtype", [{}, FP8], ids=["bf16", "fp8"])
def test_steps_between_processes_are_right(rail: str, gpus: int, dtype: dict[str, Any]) -> None:
    if gpus > torch.cuda.device_count():
        pytest.skip("RANKS ON TWO GPUS WERE NOT RUN: here is one")
    with ranks_of(devices(2, gpus), SHAPE | dtype, [0, 1], rail) as ranks:
        for rank in ranks:
            rank.send("steps", 0, max(1, STEPS // 4) if gpus == 1 else STEPS)
        assert [rank.receive() for rank in ranks] == [0, 0]
        for rank in ranks:
            rank.send("leave")
        assert [rank.receive() for rank in ranks] == ["closed"] * 2


@pytest.mark.alone
@pytest.mark.parametrize("rail", RAILS)
def test_a_killed_rank_is_named_within_the_deadline_and_the_others_go_on_without_it(rail: str) -> None:
    with ranks_of(devices(3, 2), SHAPE, [0, 1, 2], rail) as ranks:
        for rank in ranks:
            rank.send("steps", 0, 2)
        assert [rank.receive() for rank in ranks] == [0, 0, 0]
        ranks[1].process.kill()
        ranks[1].process.join()
        left, begin = [ranks[0], ranks[2]], time.monotonic()
        for rank in left:
            rank.send("steps", 2, 1)
        assert [rank.receive() for rank in left] == [(1,), (1,)]
        assert time.monotonic() - begin < DEADLINE_S + 4
        print(f"{rail}: named after {time.monotonic() - begin:.2f} s")
        for rank in left:
            rank.send("exclude", [1])
        assert [rank.receive() for rank in left] == ["went on"] * 2
        for rank in left:
            rank.send("steps", 2, 5)
        assert [rank.receive() for rank in left] == [0, 0]
        for rank in left:
            rank.send("leave")
        assert [rank.receive() for rank in left] == ["closed"] * 2
