"""Dispatch and combine among the ranks of one process: every row where it belongs, every sum right to the bit."""

from __future__ import annotations

import gc
import os
from typing import Any

import anyio
import pytest
import torch
from moe_fixture import MAPPED, expected, grouped_right, ranks_of, right_step, run_experts, same_bits, tokens_of

import asyncfabric as af
from asyncfabric.moe import MoeConfig, MoeExchange
from asyncfabric.moe.host.traffic import step_traffic

STEPS = int(os.environ.get("ASYNCFABRIC_MOE_STEPS", "40"))
"""Steps with changing routes of one exchange; 1000 is the long proof."""

SMALL: dict[str, Any] = {"num_experts": 10, "top_k": 4, "hidden": 128, "max_tokens": 24, "ranks": 4}


def check(config: MoeConfig, body: Any, rail: str | list[str] = MAPPED, **options: Any) -> None:
    anyio.run(lambda: ranks_of(config, body, rail, **options), backend="trio")


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"in_dtype": "float16", "out_dtype": "float16", "top_k": 1},
        {"in_dtype": "float32", "out_dtype": "float32", "top_k": 10, "expert_alignment": 16},
        {"in_dtype": "float8_e4m3fn", "scale_block": 64, "top_k": 8, "expert_alignment": 8},
        {"in_dtype": "float8_e4m3fn", "scale_block": 128, "out_dtype": "float32", "private_tokens": 3},
        {"num_experts": 3, "top_k": 3},  # a rank without experts
        {"ranks": 1},
        {"ranks": 2, "hidden": 7168, "max_tokens": 8},
        {"node_size": 2},
        {"node_size": 2, "private_tokens": 2, "in_dtype": "float8_e4m3fn", "scale_block": 32},
        {"node_size": 4, "expert_alignment": 4},
    ],
    ids=lambda shape: "-".join(f"{key}={value}" for key, value in shape.items()) or "plain",
)
def test_rows_come_grouped_and_sums_are_right_to_the_bit(shape: dict[str, Any]) -> None:
    config = MoeConfig(**(SMALL | shape))

    async def body(moe: MoeExchange, fabric: af.Fabric) -> None:
        for seed in range(3):
            everyone = [tokens_of(config, rank, seed) for rank in range(config.ranks)]
            handle = await moe.dispatch(*everyone[moe.rank])
            if config.node_size == 1:
                grouped_right(config, moe.rank, handle, everyone)
            result = await moe.combine(run_experts(moe, handle), handle)
            assert same_bits(result, expected(config, moe.rank, everyone[moe.rank]))

    check(config, body)


@pytest.mark.slow
@pytest.mark.parametrize(("private", "count"), [(5, 0), (5, 4), (5, 5), (5, 6), (5, 24), (0, 24), (24, 24)])
def test_private_slots_to_the_brim_and_one_past_it(private: int, count: int) -> None:
    """All tokens of rank 0 go to one other rank: 5 fill its private slot, the sixth goes with the rest."""
    config = MoeConfig(**SMALL, private_tokens=private)

    async def body(moe: MoeExchange, fabric: af.Fabric) -> None:
        tokens = tokens_of(config, moe.rank, 1, count if moe.rank == 0 else 0)
        tokens.indices[:] = config.experts_of(1).start
        handle = await moe.dispatch(*tokens)
        assert handle.rows is not None and len(handle.rows) == (count * config.top_k if moe.rank == 1 else 0)
        result = await moe.combine(run_experts(moe, handle), handle)
        assert same_bits(result, expected(config, moe.rank, tokens))

    check(config, body)


@pytest.mark.slow
@pytest.mark.parametrize("private", [0, 5, 24])
@pytest.mark.parametrize("area_rows", [3, 1000])
@pytest.mark.parametrize("rail", ["local", MAPPED], ids=["written", "stored"])
def test_writes_immediates_and_bytes_are_those_of_the_protocol(
    private: int, area_rows: int, rail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One or two writes to each peer there, one back; more only where areas are too small."""
    config = MoeConfig(**SMALL, private_tokens=private)
    monkeypatch.setattr("asyncfabric.moe.host.session.AREA_BYTES", area_rows * config.hidden * 2)

    async def body(moe: MoeExchange, fabric: af.Fabric) -> None:
        await right_step(moe, 0)
        before = await quiet(fabric)
        everyone = [tokens_of(config, rank, 1) for rank in range(config.ranks)]
        await right_step(moe, 1)
        after = await quiet(fabric)
        assert moe.mapped_ranks == (() if rail == "local" else tuple(set(range(config.ranks)) - {moe.rank}))
        traffic = step_traffic(config, [each.indices.numpy() for each in everyone], moe.rank, moe.mapped_ranks)
        assert rail == "local" or traffic.dispatch_bytes + traffic.combine_bytes == 0
        assert after["work_requests"] - before["work_requests"] == traffic.requests
        assert after["immediates_sent"] - before["immediates_sent"] == traffic.requests
        assert after["bytes_written"] - before["bytes_written"] == traffic.dispatch_bytes + traffic.combine_bytes
        if area_rows == 1000:
            others = config.ranks - 1
            assert others <= traffic.dispatch_writes <= (1 if private == 24 else 2) * others
            assert (traffic.combine_writes, traffic.signals) == (others, 0)
        else:
            assert traffic.signals > 0

    check(config, body, rail)


@pytest.mark.slow
@pytest.mark.parametrize("private", [3, 24])
@pytest.mark.parametrize("rail", ["local", MAPPED], ids=["written", "stored"])
def test_steps_that_are_over_leave_no_transfers_behind(rail: str, private: int) -> None:
    config = MoeConfig(**SMALL, private_tokens=private)

    async def body(moe: MoeExchange, fabric: af.Fabric) -> None:
        for seed in range(30):
            await right_step(moe, seed)
        gc.collect()
        kept = [each for each in gc.get_objects() if isinstance(each, af.Transfer)]
        assert len(kept) <= 5 * config.ranks**2, "those of the last step"

    check(config, body, rail)


async def quiet(fabric: af.Fabric) -> dict[str, int]:
    """Return the engine's counters once everything that was submitted is counted as done."""
    while True:
        counters = dict(fabric.statistics().counters)
        if counters["ops_submitted"] == counters["ops_completed"]:
            return counters
        await anyio.lowlevel.checkpoint()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{}, {"node_size": 2}], ids=["flat", "nodes"])
def test_ranks_without_tokens_masked_tokens_and_one_expert_for_all(shape: dict[str, Any]) -> None:
    config = MoeConfig(**SMALL, **shape)

    async def body(moe: MoeExchange, fabric: af.Fabric) -> None:
        assert len(await right_step(moe, 1, 0 if moe.rank % 2 else 24)) == (0 if moe.rank % 2 else 24)
        await right_step(moe, 2, 0)
        assert not (await right_step(moe, 3, 24, masked=2.0)).any()
        tokens = tokens_of(config, moe.rank, 4, 24)
        tokens.indices[:] = 9
        handle = await moe.dispatch(*tokens)
        assert handle.tokens_per_expert is not None
        assert int(handle.tokens_per_expert.sum()) == (config.ranks * 24 * 4 if moe.rank == 3 else 0)
        assert same_bits(await moe.combine(run_experts(moe, handle), handle), expected(config, moe.rank, tokens))

    check(config, body)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{}, {"node_size": 2, "private_tokens": 4}], ids=["flat", "nodes"])
def test_many_steps_with_changing_routes_and_a_run_repeats_to_the_bit(shape: dict[str, Any]) -> None:
    config = MoeConfig(**SMALL, **shape)
    runs: list[dict[tuple[int, int], torch.Tensor]] = [{}, {}]

    for run in runs:

        async def body(moe: MoeExchange, fabric: af.Fabric, run: Any = run) -> None:
            for seed in range(STEPS):
                run[moe.rank, seed] = await right_step(moe, seed)

        check(config, body)
    assert len(runs[0]) == STEPS * config.ranks
    assert all(same_bits(result, runs[1][place]) for place, result in runs[0].items())


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{}, {"node_size": 2}], ids=["flat", "nodes"])
def test_two_steps_in_flight_with_compute_between_the_halves(shape: dict[str, Any]) -> None:
    config = MoeConfig(**SMALL, **shape, private_tokens=3)

    async def body(moe: MoeExchange, fabric: af.Fabric) -> None:
        for seed in range(0, 8, 2):
            batches = [tokens_of(config, moe.rank, seed + each) for each in range(2)]
            handles = [await moe.dispatch_send(*tokens) for tokens in batches]
            assert moe.in_flight == tuple(handles)
            with pytest.raises(af.BusyError, match=f"combine step {seed}"):
                await moe.dispatch_send(*batches[0])
            with pytest.raises(ValueError, match=f"step {handles[1].number} cannot be received before"):
                await moe.dispatch_recv(handles[1])
            for handle in handles:
                await moe.dispatch_recv(handle)
                await moe.combine_send(run_experts(moe, handle), handle)
            for handle, tokens in zip(handles, batches, strict=True):
                assert same_bits(await moe.combine_recv(handle), expected(config, moe.rank, tokens))
            assert moe.in_flight == ()

    check(config, body)


@pytest.mark.slow
@pytest.mark.parametrize("area_rows", [1, 3, 7])
@pytest.mark.parametrize("shape", [{}, {"node_size": 2}], ids=["flat", "nodes"])
def test_areas_that_are_too_small_take_many_passes(
    area_rows: int, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MoeConfig(**SMALL, **shape, private_tokens=2)
    monkeypatch.setattr("asyncfabric.moe.host.session.AREA_BYTES", area_rows * config.hidden * 2)

    async def body(moe: MoeExchange, fabric: af.Fabric) -> None:
        for seed in range(4):
            await right_step(moe, seed)
        await right_step(moe, 9, 24 if moe.rank == 2 else 0)

    check(config, body)


@pytest.mark.parametrize("area_rows", [3, 1 << 20], ids=["passes", "whole"])
def test_the_default_dtype_of_the_program_changes_nothing(area_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = MoeConfig(**SMALL, node_size=2, private_tokens=2)
    monkeypatch.setattr("asyncfabric.moe.host.session.AREA_BYTES", area_rows * config.hidden * 2)

    async def body(moe: MoeExchange, fabric: af.Fabric) -> None:
        await right_step(moe, 9, 24)

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        check(config, body)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{}, {"private_tokens": 1}, {"node_size": 2}], ids=["flat", "rest", "nodes"])
def test_late_and_reordered_writes_change_nothing(shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some ranks send late, some in random order: a slot is never written before it was read, no bit changes."""
    config = MoeConfig(**SMALL, **shape)
    monkeypatch.setattr("asyncfabric.moe.host.session.AREA_BYTES", 5 * config.hidden * 2)
    rails = [
        "fault+local?delay_us=3000",
        "fault+local?reorder=8&seed=3",
        "fault+local",
        "fault+local?reorder=16&delay_us=500&seed=4",
    ]

    async def body(moe: MoeExchange, fabric: af.Fabric) -> None:
        for seed in range(max(6, STEPS // 10)):
            await right_step(moe, seed)

    check(config, body, rails)


@pytest.mark.slow
def test_an_exchange_runs_under_asyncio_too() -> None:
    config = MoeConfig(**SMALL, private_tokens=4)

    async def body(moe: MoeExchange, fabric: af.Fabric) -> None:
        for seed in range(3):
            await right_step(moe, seed)

    anyio.run(lambda: ranks_of(config, body), backend="asyncio")
