"""A stream of tensors from trainer ranks to rollout ranks, each with a fabric of its own: bits, differences, ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="WEIGHT STREAMS WERE NOT RUN: torch is not installed")

from asyncfabric import BrokenError, FabricConfig, FabricError, RemoteProtocolError  # noqa: E402
from asyncfabric.blocking import open_fabric  # noqa: E402
from asyncfabric.integrations.weight_stream import BucketReceiver, BucketSender, WeightPost  # noqa: E402

BUCKET, SESSION = 1 << 14, 7
LOCAL = FabricConfig(rails=("local",))


class Rank:
    """A rank of either side."""

    def __init__(self, name: str, fabric: Any) -> None:
        self.name, self.fabric = name, fabric
        self.region = fabric.allocate(2 * BUCKET)
        self.post: Any = None

    def meet(self, others: list[Rank]) -> None:
        self.post = WeightPost(self.fabric, SESSION, self.name, {one.name: bytes(one.fabric.address) for one in others})


@contextmanager
def ranks(trainers: int, rollouts: int) -> Iterator[tuple[list[Rank], list[Rank]]]:
    with ExitStack() as stack:

        def opened(role: str, count: int) -> list[Rank]:
            return [Rank(f"{role}-{one}", stack.enter_context(open_fabric(LOCAL))) for one in range(count)]

        senders, receivers = opened("trainer", trainers), opened("rollout", rollouts)
        for one in senders:
            one.meet(receivers)
        for one in receivers:
            one.meet(senders)
        yield senders, receivers


def weights(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(seed)
    tensors = [torch.randn(300, 40), torch.randn(7).bfloat16(), torch.tensor(3), torch.zeros(0, 5)]
    tensors += [torch.randn(64, 31).T for _ in range(9)]
    tensors += [torch.randint(0, 256, (5000,), dtype=torch.uint8).view(torch.float8_e4m3fn)]
    return [(f"w{number}", tensor) for number, tensor in enumerate(tensors)]


def same(got: list[tuple[str, torch.Tensor]], wanted: list[tuple[str, torch.Tensor]]) -> bool:
    return len(got) == len(wanted) and all(
        a == b and x.dtype == y.dtype and x.shape == y.shape and bits(x) == bits(y)
        for (a, x), (b, y) in zip(got, wanted, strict=True)
    )


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


async def send(rank: Rank, number: int, count: int, stream: Any) -> int:
    return await BucketSender(rank.post, rank.region, BUCKET, number, count).send(stream)


async def receive(rank: Rank, pause_s: float = 0.0) -> list[tuple[str, torch.Tensor]]:
    got = []
    async for name, tensor in BucketReceiver(rank.post, rank.fabric, rank.region, BUCKET).receive():
        await asyncio.sleep(pause_s)  # the next buckets come meanwhile
        got.append((name, tensor.clone()))
    return got


async def all_of(*calls: Any) -> list[Any]:
    return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 40)


def test_all_rollouts_get_all_tensors_and_all_trainers_send() -> None:
    with ranks(3, 2) as (trainers, rollouts):

        async def update() -> list[Any]:
            calls = [send(one, number, 3, iter(weights())) for number, one in enumerate(trainers)]
            return await all_of(*calls, receive(rollouts[0]), receive(rollouts[1], 0.01))

        *sent, first, second = asyncio.run(update())
    assert min(sent) > 0 and sum(sent) >= sum(tensor.nbytes for _, tensor in weights())
    assert same(first, weights()) and same(second, weights())


def test_trainers_whose_streams_differ_are_refused() -> None:
    with ranks(2, 1) as (trainers, rollouts):

        async def update() -> list[Any]:
            other = [*weights()[:-1], ("another", torch.zeros(3))]
            calls = [send(trainers[0], 0, 2, iter(weights())), send(trainers[1], 1, 2, iter(other))]
            return await all_of(*calls, receive(rollouts[0]))

        *sent, got = asyncio.run(update())
    assert isinstance(got, RemoteProtocolError) and "differ in names" in str(got)
    assert all(isinstance(one, BrokenError) and "rollout-0 gave the update up" in str(one) for one in sent)


def test_a_stream_that_fails_ends_the_update_everywhere_it_matters() -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights()[:2]
        raise RuntimeError("no more")

    with ranks(1, 2) as (trainers, rollouts):

        async def update() -> list[Any]:
            return await all_of(send(trainers[0], 0, 1, failing()), *(receive(one) for one in rollouts))

        sent, *got = asyncio.run(update())
    assert isinstance(sent, RuntimeError)
    assert all(isinstance(one, BrokenError) and "RuntimeError: no more" in str(one) for one in got)


@pytest.mark.parametrize("end", ["cancelled", "closed"])
def test_a_rollout_that_ends_ends_the_update_of_its_trainers(end: str) -> None:
    with ranks(2, 2) as (trainers, rollouts):

        async def leave() -> None:
            receiver = BucketReceiver(rollouts[0].post, rollouts[0].fabric, rollouts[0].region, BUCKET).receive()
            await anext(receiver)
            if end == "cancelled":
                await receiver.aclose()
            else:
                rollouts[0].fabric.close()

        async def update() -> list[Any]:
            calls = [send(one, number, 2, iter(weights())) for number, one in enumerate(trainers)]
            return await all_of(*calls, leave(), receive(rollouts[1]))

        first, second, _, got = asyncio.run(update())
    for error in (first, second):
        assert isinstance(error, BrokenError) and "rollout-0" in str(error), error
    assert isinstance(got, FabricError) or same(got, weights())


def test_a_cancelled_trainer_ends_the_update_and_its_wait() -> None:
    with ranks(1, 1) as (trainers, rollouts):

        async def update() -> list[Any]:
            sending = asyncio.create_task(send(trainers[0], 0, 1, iter(weights())))
            await asyncio.sleep(0.2)
            sending.cancel()
            return await all_of(sending, receive(rollouts[0]))

        sent, got = asyncio.run(update())
    assert isinstance(sent, asyncio.CancelledError)
    assert isinstance(got, BrokenError) and "CancelledError" in str(got)
