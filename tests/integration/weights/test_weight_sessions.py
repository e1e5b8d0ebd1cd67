"""Weights in three calls within one process: what comes when, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import trio

torch = pytest.importorskip("torch", reason="WEIGHTS IN THREE CALLS WERE NOT RUN: torch is not installed")

from asyncfabric import BrokenError, FabricConfig  # noqa: E402
from asyncfabric.weights import Rule  # noqa: E402
from asyncfabric.weights.sessions import LocalJoin, open_receiver, open_sender  # noqa: E402

LOCAL = FabricConfig(rails=("local",))


@pytest.mark.trio
async def test_an_engine_applies_what_is_whole_when_it_wants_to() -> None:
    join, weight = LocalJoin(), torch.zeros(300, 8)
    own = torch.full((320, 8), -1.0)
    applied = trio.Event()

    async def train() -> None:
        async with open_sender({"w": weight}, join, config=LOCAL) as sender:
            for version in (1, 2):
                weight.fill_(float(version))
                await sender.publish(version)
            await applied.wait()
            with pytest.raises(BrokenError, match="version 2"):
                await sender.publish(2)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(train)
            async with open_receiver({"w": own}, join, config=LOCAL) as receiver:
                assert receiver.version == receiver.poll() == 0
                assert await receiver.wait() in (1, 2)
                assert (own == -1).all(), "only apply touches the engine's tensors"
                while receiver.apply() < 2:
                    assert (own[:300] == receiver.version).all()
                    await receiver.wait()
                assert (own[:300] == 2).all() and (own[300:] == -1).all()
                assert receiver.poll() == 0 and receiver.apply() == 2
                applied.set()


@pytest.mark.trio
async def test_what_does_not_fit_is_refused_at_both_ends() -> None:
    join, refused = LocalJoin(), []

    async def end(opened: Any) -> None:
        try:
            async with opened:
                pass
        except ValueError as error:
            refused.append(str(error))

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end, open_sender({"w": torch.zeros(4, 8)}, join, config=LOCAL))
            nursery.start_soon(end, open_receiver({"v": torch.zeros(4, 8)}, join, config=LOCAL))
    assert refused == ["the rules name w, which no rank of the engine has (1 of such tensors)"] * 2


@pytest.mark.trio
async def test_bad_arguments_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.1, got 2"):
        async with open_receiver({"w": torch.zeros(4)}, LocalJoin(), config=LOCAL, rank=2, ranks=2):
            pass
    with pytest.raises(ValueError, match="is no regular expression: missing"):
        Rule(source="(")


@pytest.mark.trio
async def test_a_sender_wants_a_rank_and_ranks_or_neither() -> None:
    with pytest.raises(ValueError, match="give both rank and ranks, or neither"):
        async with open_sender({"w": torch.zeros(4)}, LocalJoin(), rank=1):
            pass
