"""What ends badly: cancelled halves, ranks that are late, gone or of another mind, misuse; and going on after it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import anyio
import pytest
import torch
from moe_fixture import PATIENCE_S, expected, ranks_of, right_step, run_experts, same_bits, tokens_of

import asyncfabric as af
from asyncfabric.moe import MissingRankError, MoeConfig, MoeExchange, MoeGroup, open_moe
from asyncfabric.moe.host.arrivals import ArrivalKind, RankArrivals

SMALL: dict[str, Any] = {"num_experts": 9, "top_k": 3, "hidden": 64, "max_tokens": 12, "ranks": 3}
SOON_S = 2.0
"""A deadline that is meant to pass; what is asserted is who is named, not when."""


def check(config: MoeConfig, body: Any) -> None:
    anyio.run(lambda: ranks_of(config, body), backend="trio")


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_who_leaves_after_its_last_message_is_not_missed_by_who_waits_for_others(backend: str) -> None:
    """A waits for B and C; B sends and closes its fabric, C sends later."""

    async def run() -> None:
        rails = af.FabricConfig(rails=("local",))
        async with af.open_fabric(rails) as a, af.open_fabric(rails) as c, AsyncExitStack() as left:
            b = await left.enter_async_context(af.open_fabric(rails))
            peers = {1: await a.connect(c.address), 2: await a.connect(b.address)}
            arrivals = RankArrivals(a, 1000, 1, 0, peers)
            imms = {member: 1000 + ArrivalKind.BACK * 3 + member for member in (1, 2)}

            async def wait() -> None:
                await arrivals.wait(ArrivalKind.BACK, 0, [0, 1, 2], "results", [0, 1, 2])

            with anyio.fail_after(PATIENCE_S):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(wait)
                    await anyio.wait_all_tasks_blocked()
                    await b.barrier(af.PeerGroup([await b.connect(a.address)]), imms[2])
                    await left.aclose()
                    with a.counter(7) as never, pytest.raises(af.PeerError):
                        await never.wait(1, peers=[peers[2]])
                    await anyio.wait_all_tasks_blocked()
                    await c.barrier(af.PeerGroup([await c.connect(a.address)]), imms[1])

    anyio.run(run, backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{"private_tokens": 2}, {"ranks": 4, "node_size": 2}], ids=["flat", "nodes"])
def test_every_half_can_be_cancelled_and_called_again(shape: dict[str, Any]) -> None:
    """Rank 0 comes late to each half; the others give up again and again before, and lose nothing."""
    config = MoeConfig(**(SMALL | shape))

    async def until_there(call: Any) -> Any:
        for patience in [0.0, 0.001, 0.002, 0.004, 0.01, *[0.02] * 5000]:
            with anyio.move_on_after(patience):
                try:
                    return await call()
                except MissingRankError as late:
                    assert not late.lost
        raise AssertionError("the half never ended")

    async def body(moe: MoeExchange, fabric: af.Fabric) -> None:
        for seed in range(4):
            tokens = tokens_of(config, moe.rank, seed, 12)
            with anyio.CancelScope() as scope:
                scope.cancel()
                await moe.dispatch(*tokens)
            assert scope.cancelled_caught and moe.in_flight == (), "nothing left: the step did not begin"
            if moe.rank == 0:
                await anyio.sleep(0.03)
            handle = await moe.dispatch_send(*tokens)
            await until_there(partial(moe.dispatch_recv, handle))
            outputs = run_experts(moe, handle)
            if moe.rank == 0:
                await anyio.sleep(0.03)
            await until_there(partial(moe.combine_send, outputs, handle))
            result = await until_there(partial(moe.combine_recv, handle))
            assert same_bits(result, expected(config, moe.rank, tokens))

    check(config, body)


@pytest.mark.slow
def test_a_dispatch_that_was_cancelled_on_its_way_is_found_in_flight() -> None:
    config = MoeConfig(**SMALL)
    go: dict[str, Any] = {}

    async def body(moe: MoeExchange, fabric: af.Fabric) -> None:
        gate = go.setdefault("gate", anyio.Event())
        tokens = tokens_of(config, moe.rank, 1, 12)
        if moe.rank == 0:
            await gate.wait()
            handle = await moe.dispatch(*tokens)
        else:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:

                    async def cut() -> None:
                        while not moe.in_flight:
                            await anyio.lowlevel.checkpoint()
                        scope.cancel()

                    tasks.start_soon(cut)
                    await moe.dispatch(*tokens)
            assert scope.cancelled_caught
            if moe.rank == 1:
                gate.set()
            (handle,) = moe.in_flight
            await moe.dispatch_recv(handle)
        result = await moe.combine(run_experts(moe, handle), handle)
        assert same_bits(result, expected(config, moe.rank, tokens))
        await right_step(moe, 2)

    check(config, body)


@pytest.mark.slow
def test_a_late_rank_is_named_before_the_deadline_and_the_step_goes_on() -> None:
    config = MoeConfig(**SMALL)
    go: dict[str, Any] = {}

    async def body(moe: MoeExchange, fabric: af.Fabric) -> None:
        named, both = go.setdefault("named", ([], anyio.Event()))
        tokens = tokens_of(config, moe.rank, 1)
        if moe.rank == 2:
            await both.wait()
            handle = await moe.dispatch(*tokens)
        else:
            handle = await moe.dispatch_send(*tokens)
            with (
                anyio.fail_after(SOON_S),
                pytest.raises(MissingRankError, match="step 0 waits for records: rank 2") as e,
            ):
                await moe.dispatch_recv(handle)
            assert (e.value.ranks, e.value.lost) == ((2,), False)
            named.append(moe.rank)
            if len(named) == 2:
                both.set()
            await moe.dispatch_recv(handle)
        result = await moe.combine(run_experts(moe, handle), handle)
        assert same_bits(result, expected(config, moe.rank, tokens))

    check(config, body)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2], ids=["flat", "nodes"])
def test_the_others_go_on_without_a_rank_that_is_gone(size: int) -> None:
    """Rank 1 (with nodes: node 1) leaves after a dispatch; the others name it, exclude it, and go on."""
    config = MoeConfig(**(SMALL | {"ranks": 3 * size, "node_size": size}))
    gone = tuple(range(size, 2 * size))
    ended: list[int] = []

    async def one(rank: int, fabric: af.Fabric, addresses: list[af.FabricAddress]) -> None:
        async with open_moe(fabric, MoeGroup(rank, addresses), config) as moe:
            await right_step(moe, 1)
            if rank in gone:
                return
            tokens = tokens_of(config, rank, 2)
            handle = await moe.dispatch_send(*tokens)
            with anyio.fail_after(SOON_S), pytest.raises(MissingRankError) as error:
                await moe.dispatch_recv(handle)
            # A write to memory that is gone may take the other targets of its scatter along: they are named too.
            assert set(error.value.ranks) & set(gone)
            await moe.exclude(gone)
            assert moe.present == tuple(each for each in range(config.ranks) if each not in gone)
            with pytest.raises(af.BrokenError, match="lost when ranks were excluded"):
                await moe.dispatch_recv(handle)
            for seed in range(3, 6):
                tokens = tokens_of(config, rank, seed)
                handle = await moe.dispatch(*tokens)
                result = await moe.combine(run_experts(moe, handle), handle)
                assert same_bits(result, expected(config, rank, tokens, gone))
            ended.append(rank)

    async def everything() -> None:
        with anyio.fail_after(PATIENCE_S):
            async with AsyncExitStack() as stack:
                fabrics = [await stack.enter_async_context(af.open_fabric()) for _ in range(config.ranks)]
                addresses = [fabric.address for fabric in fabrics]
                async with anyio.create_task_group() as tasks:
                    for rank, fabric in enumerate(fabrics):
                        tasks.start_soon(one, rank, fabric, addresses)

    anyio.run(everything, backend="trio")
    assert len(ended) == 2 * size


@pytest.mark.slow
@pytest.mark.parametrize("half", ["dispatch", "combine"])
def test_who_was_excluded_while_it_stood_still_learns_that_the_others_are_gone(half: str) -> None:
    """Its writes meet dead keys. That is no accident of one transfer: for it the others are lost."""
    config = MoeConfig(**SMALL)
    go: dict[str, Any] = {}
    ended: list[int] = []

    async def body(moe: MoeExchange, fabric: af.Fabric) -> None:
        excluded = go.setdefault("excluded", [anyio.Event(), anyio.Event()])
        tokens = tokens_of(config, moe.rank, 2, 12)
        if moe.rank == 0:
            tokens.indices[tokens.indices >= config.experts_of(2).start] = -1  # nothing for rank 2, nothing back
        if moe.rank == 2:
            handle = await moe.dispatch(*tokens) if half == "combine" else None
            for each in excluded:
                await each.wait()
            if handle is None:  # what came before is good, what is sent goes nowhere, and the next one has learned why
                await moe.dispatch(*tokens)
                with pytest.raises(MissingRankError) as error:
                    await moe.dispatch_send(*tokens)
            else:
                with anyio.fail_after(SOON_S), pytest.raises(MissingRankError) as error:
                    await moe.combine(run_experts(moe, handle), handle)
            assert error.value.lost and 0 in error.value.ranks and 2 not in error.value.ranks
        else:
            with anyio.fail_after(SOON_S), pytest.raises(MissingRankError) as error:
                handle = await moe.dispatch(*tokens)
                await moe.combine(run_experts(moe, handle), handle)
            assert error.value.ranks == (2,) and not error.value.lost
            await moe.exclude([2])
            excluded[moe.rank].set()
            handle = await moe.dispatch(*tokens)
            result = await moe.combine(run_experts(moe, handle), handle)
            assert same_bits(result, expected(config, moe.rank, tokens, (2,)))
        ended.append(moe.rank)

    check(config, body)
    assert sorted(ended) == [0, 1, 2]


@pytest.mark.slow
def test_ranks_of_another_mind_are_distinguished() -> None:
    """Another configuration does not open; a second exchange on the same fabrics has immediates of its own."""
    config = MoeConfig(**SMALL)

    async def body(moe: MoeExchange, fabric: af.Fabric) -> None:
        other = MoeConfig(**(SMALL | {"top_k": 1 + (moe.rank == 1)}))
        again = MoeGroup(moe.rank, moe._group.addresses, "second")
        with pytest.raises(af.RemoteProtocolError, match="another configuration"):
            async with open_moe(fabric, again, other):
                pass
        third = MoeGroup(moe.rank, moe._group.addresses, "third")
        async with open_moe(fabric, third, config) as beside:
            await right_step(moe, 1)
            await right_step(beside, 2)
            await right_step(moe, 3)

    check(config, body)


@pytest.mark.slow
def test_misuse_is_reported_with_the_value_and_the_bound() -> None:
    config = MoeConfig(**(SMALL | {"ranks": 1}))
    scaled = {"in_dtype": "float8_e4m3fn", "scale_block": 32}

    async def body(moe: MoeExchange, fabric: af.Fabric) -> None:
        x, indices, weights, _ = tokens_of(config, 0, 1, 5)
        for arguments, kind, text in [
            ((x.float(), indices, weights), TypeError, "x must be of torch.bfloat16, got torch.float32"),
            ((x[:, :16], indices, weights), ValueError, r"x must have the shape \[tokens, 64\]"),
            ((x, indices[:4], weights), ValueError, r"indices must have the shape \[5, 3\], got \[4, 3\]"),
            ((x, indices.float(), weights), TypeError, "indices must be of torch.int32 or torch.int64"),
            ((x, indices + 9, weights), ValueError, r"indices must be in -1\.\.8"),
            ((x, indices, weights.double()), TypeError, "weights must be of torch.float32"),
            ((x, indices, weights.T.contiguous().T), ValueError, "weights must be contiguous"),
            ((x, indices, weights, weights), TypeError, "config.scale_block is 0"),
            ((x.repeat(3, 1), indices, weights), ValueError, "x has 15 tokens, config.max_tokens is 12"),
            (([1.0], indices, weights), TypeError, "x must be a torch tensor, got list"),
        ]:
            with pytest.raises(kind, match=text):
                await moe.dispatch(*arguments)
        handle = await moe.dispatch_send(x, indices, weights)
        with pytest.raises(ValueError, match="step 0 has no rows yet"):
            await moe.combine_send(x, handle)
        await moe.dispatch_recv(handle)
        with pytest.raises(ValueError, match="expert_rows must have the shape"):
            await moe.combine_send(torch.zeros(1, 64, dtype=torch.bfloat16), handle)
        with pytest.raises(ValueError, match="was not sent back"):
            await moe.combine_recv(handle)
        await moe.combine(run_experts(moe, handle), handle)
        with pytest.raises(ValueError, match="was combined already"):
            await moe.combine_recv(handle)
        with pytest.raises(ValueError, match=r"can exclude \[\], got \[0\]"):
            await moe.exclude([0])
        with pytest.raises(ValueError, match="the group has 1 addresses"):
            open_moe(fabric, MoeGroup(0, [fabric.address]), MoeConfig(**SMALL))
        with pytest.raises(ValueError, match=r"the exchange needs \d+ bytes on each rank"):
            open_moe(
                fabric, MoeGroup(0, [fabric.address]), MoeConfig(**(SMALL | {"ranks": 1, "buffer_limit_bytes": 9}))
            )

    check(config, body)
    for wrong, text in [
        ({"hidden": 40}, "hidden must be a multiple of 16"),
        ({"in_dtype": "int8"}, "in_dtype must be one of"),
        ({"out_dtype": "float8_e4m3fn"}, "out_dtype must be one of"),
        ({"node_size": 2}, "ranks must be a multiple of node_size 2, got 3"),
        ({"private_tokens": 13}, r"private_tokens must be in 0\.\.12"),
        ({**scaled, "scale_block": 24}, "scale_block must divide hidden 64"),
    ]:
        with pytest.raises(ValueError, match=text):
            MoeConfig(**(SMALL | wrong))
    with pytest.raises(TypeError, match="top_k must be an integer, got float"):
        MoeConfig(**(SMALL | {"top_k": 2.0}))
