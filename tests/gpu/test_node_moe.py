"""By the nodes: one copy of a token for each node, sums of a node added up in it. Nodes of 2 and 4 ranks on the GPUs.

Ranks of a node reach each other's memory, those of other nodes are as if on another host, behind a proxy.
"""

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

STEPS = int(os.environ.get("ASYNCFABRIC_MOE_STEPS", "100"))
SMALL: dict[str, Any] = {"num_experts": 21, "top_k": 6, "hidden": 256, "max_tokens": 24, "private_tokens": 9}
FP8: dict[str, Any] = {"in_dtype": "float8_e4m3fn", "scale_block": 64, "expert_alignment": 8}
DTYPES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {"in_dtype": "float16", "out_dtype": "float16", "expert_alignment": 3},
    "fp32": {"in_dtype": "float32", "out_dtype": "float32"},
    "fp8": FP8,
    "wide": FP8 | {"hidden": 7168, "top_k": 8, "scale_block": 128, "num_experts": 256},
    "one in flight": {"in_flight": 1, "private_tokens": 0},
}
NODES = [(4, 2), (8, 2), (8, 4)]


def hosts_of(ranks: int, node_size: int) -> list[int]:
    """Return a host for each node."""
    return [rank // node_size for rank in range(ranks)]


@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ranks", "node_size"), NODES)
async def test_rows_come_grouped_and_sums_are_right_to_the_bit(
    ranks: int, node_size: int, dtype: str, split: bool
) -> None:
    config = MoeConfig(**(SMALL | DTYPES[dtype]), ranks=ranks, node_size=node_size)
    async with cast_of(config, hosts=hosts_of(ranks, node_size)) as cast:
        for seed in range(4):
            await cast.right_step(seed, split=split)


@pytest.mark.parametrize("hosts", [[0, 0, 0, 0], [0, 1, 2, 3]], ids=["one host", "a host for each rank"])
async def test_nodes_may_be_on_one_host_or_their_ranks_on_several(hosts: list[int]) -> None:
    config = MoeConfig(**SMALL, ranks=4, node_size=2)
    async with cast_of(config, hosts=hosts) as cast:
        for seed in range(4):
            await cast.right_step(seed, split=seed % 2 == 1)


async def test_many_steps_with_changing_routes() -> None:
    config = MoeConfig(**(SMALL | FP8), ranks=4, node_size=2)
    async with cast_of(config, hosts=hosts_of(4, 2)) as cast:
        for seed in range(STEPS):
            await cast.right_step(seed, split=seed % 3 == 0, check_rows=seed % 10 == 0)


@pytest.mark.parametrize("number", [0, 20, -1])
async def test_all_tokens_to_one_expert_and_all_masked(number: int) -> None:
    config = MoeConfig(**SMALL, ranks=4, node_size=2)
    async with cast_of(config, hosts=hosts_of(4, 2)) as cast:
        everyone = [tokens_of(config, rank, number + 1, 24 * (rank != 2)) for rank in range(4)]
        for tokens in everyone:
            tokens.indices[:] = number
        for rank, out in enumerate(await cast.step(everyone)):
            assert same_bits(out, expected(config, rank, everyone[rank]))


async def test_a_graph_replayed_with_changing_routes() -> None:
    config = MoeConfig(**SMALL, ranks=4, node_size=2)
    async with cast_of(config, hosts=hosts_of(4, 2)) as cast:
        sets = [[tokens_of(config, rank, seed, 24) for rank in range(4)] for seed in range(8)]
        right = [[expected(config, rank, each[rank]) for rank in range(4)] for each in sets]
        await replay(cast, sets, right, STEPS)


@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
@pytest.mark.parametrize("away", [1, 2, 3])
async def test_a_rank_that_does_not_come_is_named_by_all_and_the_others_go_on_without_its_node(away: int) -> None:
    """Also by those who wait for a rank that itself waits for it, and learn of it by way of others."""
    config = MoeConfig(**SMALL, ranks=4, node_size=2)
    async with cast_of(config, deadline_s=3.0, hosts=hosts_of(4, 2)) as cast:
        await cast.right_step(0)
        everyone = [tokens_of(config, rank, 1, 24) for rank in range(4)]
        for tokens in everyone:
            tokens.indices[:, :4] = torch.tensor([0, 6, 12, 20])  # an expert of each rank
        given = [tokens.on(moe.device) for tokens, moe in zip(everyone, cast.ranks, strict=True)]
        await cast.settle()
        there = [rank for rank in range(4) if rank != away]
        for rank in there:
            with torch.cuda.stream(cast.streams[rank]):
                cast.ranks[rank].dispatch(*given[rank])
        for rank in there:
            with torch.cuda.stream(cast.streams[rank]), pytest.raises(MissingRankError, match=f"rank {away}") as found:
                await cast.ranks[rank].settled()
            assert found.value.ranks == (away,) and found.value.lost
        gone = tuple(range(away // 2 * 2, away // 2 * 2 + 2))
        rest = [rank for rank in range(4) if rank not in gone]
        async with anyio.create_task_group() as tasks:
            for rank in rest:
                tasks.start_soon(cast.ranks[rank].exclude, gone)
        left = Cast([cast.ranks[rank] for rank in rest], [cast.streams[rank] for rank in rest])
        for seed in range(3):
            everyone = [tokens_of(config, rank, seed, 24) for rank in rest]
            for moe, tokens, out in zip(left.ranks, everyone, await left.step(everyone, check_rows=False), strict=True):
                assert same_bits(out, expected(config, moe.rank, tokens, gone))


SHAPE: dict[str, Any] = {"num_experts": 10, "top_k": 4, "hidden": 1024, "max_tokens": 64, "node_size": 2}


def devices(ranks: int) -> list[str]:
    """Return GPUs for ranks: those of a node on different ones."""
    return [f"cuda:{rank % torch.cuda.device_count()}" for rank in range(ranks)]


@pytest.mark.alone
@pytest.mark.parametrize("dtype", [{}, FP8], ids=["bf16", "fp8"])
def test_steps_between_processes_are_right(dtype: dict[str, Any]) -> None:
    with ranks_of(devices(4), SHAPE | dtype, hosts_of(4, 2)) as ranks:
        for rank in ranks:
            rank.send("steps", 0, 5 * torch.cuda.device_count())
        assert [rank.receive() for rank in ranks] == [0] * 4
        for rank in ranks:
            rank.send("leave")
        assert [rank.receive() for rank in ranks] == ["closed"] * 4


@pytest.mark.alone
def test_a_killed_rank_is_named_and_the_other_node_goes_on() -> None:
    with ranks_of(devices(4), SHAPE, hosts_of(4, 2)) as ranks:
        for rank in ranks:
            rank.send("steps", 0, 2)
        assert [rank.receive() for rank in ranks] == [0] * 4
        ranks[2].process.kill()
        ranks[2].process.join()
        left, begin = [ranks[0], ranks[1]], time.monotonic()
        for rank in (*left, ranks[3]):
            rank.send("steps", 2, 1)
        assert [rank.receive() for rank in (*left, ranks[3])] == [(2,)] * 3
        assert time.monotonic() - begin < 4 * DEADLINE_S + 4
        for rank in left:
            rank.send("exclude", [2, 3])
        assert [rank.receive() for rank in left] == ["went on"] * 2
        for rank in left:
            rank.send("steps", 2, 5)
        assert [rank.receive() for rank in left] == [0, 0]
        for rank in left:
            rank.send("leave")
        assert [rank.receive() for rank in left] == ["closed"] * 2
