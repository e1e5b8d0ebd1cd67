"""One rank of an exchange among GPUs as a process of its own, driven over a pipe by a test."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import anyio
import anyio.to_thread
from preloaded import PRELOADED

import asyncfabric as af

PATIENCE_S, DEADLINE_S = 120.0, 8.0


async def _steps(moe: Any, first: int, count: int) -> int:
    from nvlink_fixture import expected, run_experts, same_bits, tokens_of

    wrong = 0
    gone = tuple(set(range(moe.config.ranks)) - set(moe.present))
    for seed in range(first, first + count):
        tokens = tokens_of(moe.config, moe.rank, seed)
        handle = moe.dispatch(*tokens.on(moe.device))
        await moe.settled()  # the proxies want the loop: nothing here may wait for the GPU
        out = moe.combine(run_experts(moe, handle), handle)
        await moe.settled()
        wrong += not same_bits(out, expected(moe.config, moe.rank, tokens, gone))
    return wrong


async def _serve(pipe: Connection, device: str, rail: str) -> None:
    import torch

    from asyncfabric.moe import MissingRankError, MoeConfig, MoeGroup
    from asyncfabric.moe.gpu import open_moe_cuda

    torch.cuda.set_device(device)
    torch.set_num_threads(4)  # several ranks compute what is right on the same cores
    async with af.open_fabric(af.FabricConfig(rails=(rail,))) as fabric:
        pipe.send(bytes(fabric.address))
        rank, addresses, shape, hosts, deadline_s = await anyio.to_thread.run_sync(pipe.recv)
        group = MoeGroup(rank, [af.FabricAddress.from_bytes(each) for each in addresses])
        with anyio.fail_after(PATIENCE_S):
            async with open_moe_cuda(
                fabric, group, MoeConfig(**shape), device=device, hosts=hosts, blocks=32, deadline_s=deadline_s
            ) as moe:
                pipe.send("open")
                while True:
                    word, *arguments = await anyio.to_thread.run_sync(pipe.recv)
                    try:
                        if word == "steps":
                            pipe.send(await _steps(moe, *arguments))
                        elif word == "exclude":
                            await moe.exclude(*arguments)
                            pipe.send("went on")
                        else:
                            break
                    except MissingRankError as error:
                        pipe.send(error.ranks)
        pipe.send("closed")


def _main(pipe: Connection, device: str, rail: str) -> None:
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"  # one rank has few streams, and work queues of a GPU are few
    anyio.run(_serve, pipe, device, rail, backend="trio")


class Rank:
    """A process; `send` and `receive` talk to it."""

    def __init__(self, device: str, rail: str) -> None:
        """Start it on a GPU, with a fabric on a rail."""
        self.pipe, far = PRELOADED.Pipe()
        self.process = PRELOADED.Process(target=_main, args=(far, device, rail))
        self.process.start()
        far.close()

    def receive(self) -> Any:
        """Return what it sends next."""
        assert self.pipe.poll(PATIENCE_S), "a rank sends nothing"
        return self.pipe.recv()

    def send(self, *words: Any) -> None:
        """Send it an order."""
        self.pipe.send(words)


@contextlib.contextmanager
def ranks_of(
    devices: list[str],
    shape: dict[str, Any],
    hosts: list[int] | None = None,
    rail: str = "local",
    deadline_s: float = DEADLINE_S,
) -> Iterator[list[Rank]]:
    """Start a rank on each of these devices and open an exchange among them."""
    ranks: list[Rank] = []
    try:
        ranks.extend(Rank(device, rail) for device in devices)
        addresses = [rank.receive() for rank in ranks]
        for number, rank in enumerate(ranks):
            rank.send(number, addresses, shape | {"ranks": len(ranks)}, hosts, deadline_s)
        assert [rank.receive() for rank in ranks] == ["open"] * len(ranks)
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join(PATIENCE_S)
            rank.pipe.close()
