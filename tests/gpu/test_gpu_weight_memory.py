"""What a trainer on a GPU takes beside its shards: no more than its scratch, as the driver counts it; no codings."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weight_fixture import random_shard, run, small_plan
from weight_gpus import Tensors, gpu_fixture

import asyncfabric as af
from asyncfabric.weights import Mesh, Move, Plan, alone, place, plan_weights
from asyncfabric.weights.update import open_publisher

MIB = 1 << 20
SIDE, SCRATCH = 4096, 160 * MIB


def square_plan(matrices: int) -> Plan:
    """Quantised matrices, every other one turned round, from one trainer to one receiver."""
    held = place((SIDE, SIDE), Mesh.of({"fsdp": 1}), {})
    targets = [alone(place((SIDE, SIDE), Mesh.of({"tp": 1}), {}), *turn) for turn in ((), ((1, 0),))]
    moves = [
        Move(f"w{number}", "bfloat16", held, f"w{number}", "float8_e4m3fn", targets[number % 2], 128)
        for number in range(matrices)
    ]
    return plan_weights(moves, trainers=1, receivers=1, replicas=["a"], chunk_bytes=16 * MIB)


def square_shard(rank: int, name: str) -> Any:
    values = np.random.default_rng(int(name[1:])).standard_normal((SIDE, SIDE), np.float32)
    return (values.view(np.uint32) >> 16).astype("<u2")


@contextmanager
def lowest_free(device: int) -> Iterator[list[int]]:
    """Sample the free bytes of a GPU; the list has the fewest seen."""
    import torch

    found, over = [torch.cuda.mem_get_info(device)[0]], threading.Event()

    def look() -> None:
        while not over.wait(0.0005):  # so that others get the interpreter lock
            found[0] = min(found[0], torch.cuda.mem_get_info(device)[0])

    sampling = threading.Thread(target=look)
    sampling.start()
    try:
        yield found
    finally:
        over.set()
        sampling.join()


@pytest.mark.alone
def test_memory_beyond_the_shards_stays_under_the_watermark(tmp_path: Path, far: int) -> None:
    import torch

    async def body() -> None:
        async with gpu_fixture(small_plan(), random_shard, tmp_path / "warm", far) as (fixture, _):
            await fixture.bring(1)  # what the driver loads with the first launches is not counted
        torch.cuda.empty_cache()
        plan = square_plan(12)
        async with gpu_fixture(plan, square_shard, tmp_path / "log", far, scratch_bytes=SCRATCH) as (fixture, _):
            torch.cuda.synchronize()
            before = torch.cuda.mem_get_info(0)[0]
            with lowest_free(0) as found:
                for version in (1, 2, 3):
                    await fixture.update(version)
                    await fixture.flip(version)  # the next one is written where the one before it serves no more
            assert 32 * MIB < before - found[0] <= SCRATCH

    run(body)


def test_codings_of_shards_on_a_gpu_are_refused() -> None:
    plan = small_plan()
    tensors = Tensors(plan).given(0, {name: random_shard(0, name) for name in ("gate", "up", "down")})

    async def body() -> None:
        async with af.open_fabric(af.FabricConfig(rails=("cuda:0",))) as fabric:
            with pytest.raises(
                ValueError, match="codings work in host memory only, and the shards of rank 0 are on cuda:0"
            ):
                async with open_publisher(fabric, None, plan, 0, tensors, codings=["exponent"]):  # type: ignore[arg-type]
                    pass

    run(body)
