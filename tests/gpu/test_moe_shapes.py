"""What an exchange among GPUs is asked for: each number of choices, all widths and dtypes, more ranks than GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nvlink_fixture import ONE_LOOP, cast_of, expected, same_bits, tokens_of

from asyncfabric.moe import MoeConfig

pytestmark = pytest.mark.anyio

HIDDEN = (128, 256, 512, 1024, 2048, 2880, 4096, 5120, 6144, 7168)
DTYPES: tuple[dict[str, Any], ...] = (
    {"in_dtype": "bfloat16"},
    {"in_dtype": "float16", "out_dtype": "float16"},
    {"in_dtype": "float32", "out_dtype": "float32"},
    {"in_dtype": "float8_e4m3fn", "scale_block": 64},
)
HOSTS = {"nvlink": None, "proxied": [0, 1]}


@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
@pytest.mark.parametrize("path", HOSTS)
@pytest.mark.parametrize("top_k", range(1, 11))
async def test_each_number_of_choices(top_k: int, path: str) -> None:
    shape = DTYPES[top_k % 4] | {"hidden": HIDDEN[top_k - 1], "private_tokens": 11}
    config = MoeConfig(num_experts=23, top_k=top_k, max_tokens=40, ranks=2, **shape)
    async with cast_of(config, hosts=HOSTS[path]) as cast:
        for seed in range(3):
            await cast.right_step(seed, split=seed == 1)


@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
@pytest.mark.parametrize("node_size", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [4, 8])
async def test_more_ranks_than_gpus(ranks: int, node_size: int) -> None:
    """As if `node_size` of them were on each host; 8 of one host are those of NVLink alone."""
    hosts = [rank // node_size for rank in range(ranks)]
    config = MoeConfig(num_experts=2 * ranks + 3, top_k=6, hidden=512, max_tokens=40, ranks=ranks, private_tokens=9)
    async with cast_of(config, hosts=hosts) as cast:
        for seed in range(6):
            await cast.right_step(seed, split=seed % 3 == 1)


async def test_ranks_of_one_process_that_do_not_fit_on_a_gpu_together_are_refused() -> None:
    ranks = 2 * torch.cuda.device_count()
    config = MoeConfig(num_experts=8, top_k=2, hidden=128, max_tokens=8, ranks=ranks)
    with pytest.raises((ValueError, ExceptionGroup)) as found:
        async with cast_of(config, blocks=[70] * ranks):
            pass
    errors = found.value.exceptions if isinstance(found.value, ExceptionGroup) else [found.value]
    assert errors and all("more blocks on cuda:" in str(error) for error in errors)


@pytest.mark.parametrize("more", [-1, 0, 1])
async def test_just_as_many_tokens_as_leave_in_one_write(more: int) -> None:
    """P - 1, P and P + 1 rows for the rank behind the proxy: only the last needs a second write."""
    private = 12
    config = MoeConfig(num_experts=10, top_k=4, hidden=256, max_tokens=24, ranks=2, private_tokens=private)
    async with cast_of(config, hosts=[0, 1]) as cast:
        for seed in range(4):
            everyone = [tokens_of(config, rank, seed, private + more, masked=0) for rank in range(2)]
            for rank, tokens in enumerate(everyone):
                tokens.indices[:, 0] = config.experts_of(1 - rank)[seed]  # each goes to the other rank
            for rank, out in enumerate(await cast.step(everyone)):
                assert same_bits(out, expected(config, rank, everyone[rank]))
