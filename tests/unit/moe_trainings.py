"""The ranks of a training in one process, each with a fabric and a worker thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
from moe_fixture import PATIENCE_S

import asyncfabric as af
from asyncfabric.moe import MoeConfig, MoeGroup, MoeTraining, open_moe_training

Train = Callable[[int, MoeTraining], None]


async def with_trainings(config: MoeConfig, train: Train) -> None:
    """Run `train(rank, training)` on a worker thread for each rank."""
    async with anyio.create_task_group() as tasks:
        fabrics = []

        async def one(rank: int, ready: Any, task_status: Any) -> None:
            async with af.open_fabric(af.FabricConfig(rails=("local",))) as fabric:
                fabrics.append((rank, fabric))
                task_status.started()
                await ready.wait()
                addresses = [each.address for _, each in sorted(fabrics, key=lambda pair: pair[0])]
                async with open_moe_training(fabric, MoeGroup(rank, addresses), config) as training:
                    await anyio.to_thread.run_sync(train, rank, training)

        everybody = anyio.Event()
        for rank in range(config.ranks):
            await tasks.start(one, rank, everybody)
        everybody.set()


def run(config: MoeConfig, train: Train, backend: str = "trio") -> None:
    async def main() -> None:
        with anyio.fail_after(PATIENCE_S):
            await with_trainings(config, train)

    anyio.run(main, backend=backend)
