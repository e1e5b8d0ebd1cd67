"""What an exchange among GPUs is asked for: each number of choices, all widths and dtypes, more ranks than GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nvlink_fixture import ONE_LOOP, cast_of, expected, given_to, rank_tokens_of, same_bits, tokens_of

from asyncfabric.errors import RemoteProtocolError
from asyncfabric.moe import MoeConfig
from asyncfabric.moe.gpu import cuda_buffer_bytes, open_moe_cuda, open_moe_ranks

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


BY_RANK: dict[str, Any] = {"num_experts": 4, "top_k": 4, "ranks": 4, "hidden": 512, "max_tokens": 40}


@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
@pytest.mark.parametrize("hosts", [None, [0, 0, 1, 1]], ids=["nvlink", "proxied"])
@pytest.mark.parametrize("dtype", [DTYPES[0], DTYPES[3] | {"expert_alignment": 7}], ids=["bf16", "fp8"])
async def test_ranks_that_are_experts_have_room_for_each_token_once(
    dtype: dict[str, Any], hosts: list[int] | None
) -> None:
    """First all tokens go to all ranks, which fills the rows to the last; then random ones, to none among them."""
    config = MoeConfig(**(BY_RANK | dtype), private_tokens=9)
    async with cast_of(config, hosts=hosts, opening=open_moe_ranks) as cast:
        for moe in cast.ranks:
            assert moe._site.layout.row_capacity(moe.rank) == 4 * 40 + config.expert_alignment - 1
            assert moe.buffer_bytes < cuda_buffer_bytes(config)
        for seed, (count, masked) in enumerate([(40, 0.0), (None, 0.3), (40, 0.0), (None, 0.9), (40, 1.0)]):
            everyone = [rank_tokens_of(config, rank, seed, count, masked) for rank in range(4)]
            for rank, out in enumerate(await cast.step(everyone, split=seed % 2 == 1)):
                assert same_bits(out, expected(config, rank, everyone[rank])), f"rank {rank}, seed {seed}"


async def test_an_exchange_whose_experts_are_its_ranks_takes_no_numbers_of_ranks() -> None:
    config = MoeConfig(**(BY_RANK | {"num_experts": 2, "top_k": 2, "ranks": 2}))
    async with cast_of(config, opening=open_moe_ranks) as cast:
        numbers = [rank_tokens_of(config, rank, 0, 3) for rank in range(2)]
        for moe, tokens in zip(cast.ranks, numbers, strict=True):
            x, indices, weights, _ = tokens.on(moe.device)
            with pytest.raises(TypeError, match=r"indices must be of torch\.bool, got torch\.int64"):
                moe.dispatch(x, indices, weights)
            with pytest.raises(ValueError, match=r"indices must have the shape \[3, 2\], got \[2, 2\]"):
                moe.dispatch(x, given_to(moe, tokens).indices[:2], weights)
            assert not moe.in_flight, "nothing was sent"
        for out, tokens, rank in zip(await cast.step(numbers), numbers, range(2), strict=True):
            assert same_bits(out, expected(config, rank, tokens))


async def test_ranks_that_open_an_exchange_by_different_calls_do_not_meet() -> None:
    """One that sends all choices of a token to one rank would write behind the rows of those that have room for one."""

    def either(fabric: Any, group: Any, config: MoeConfig, **options: Any) -> Any:
        return (open_moe_ranks if group.rank else open_moe_cuda)(fabric, group, config, **options)

    config = MoeConfig(**(BY_RANK | {"num_experts": 2, "top_k": 2, "ranks": 2}))
    with pytest.raises((RemoteProtocolError, ExceptionGroup)) as found:
        async with cast_of(config, opening=either):
            pass
    errors = found.value.exceptions if isinstance(found.value, ExceptionGroup) else [found.value]
    assert any("with another configuration" in str(error) for error in errors)


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
