"""A training that cannot be opened ends the waits of its engines."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import anyio
import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from asyncfabric import BrokenError
from asyncfabric.integrations.vllm_weights.calling_join import CallingJoin
from asyncfabric.weights.sessions import open_sender
from asyncfabric.weights.sessions.blueprint import Wish, get_answer, put_wish

PATIENCE_S = 20.0


async def joined(join: CallingJoin) -> None:
    """Do what an engine's rank does: report its tensors, and wait for the training's answer."""
    with anyio.fail_after(PATIENCE_S):
        number = await put_wish(join, Wish("engine", 0, 1, {}, ()))
        await get_answer(join, number)


def test_an_engine_that_waits_for_its_answer_ends_with_the_error_of_the_training() -> None:
    store = dist.HashStore()
    training, engine = CallingJoin(store), CallingJoin(store)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(partial(anyio.run, joined, engine))
        training.end(MemoryError("rank 1 has no room"))
        with pytest.raises(BrokenError, match="MemoryError: rank 1 has no room"):
            waiting.result(2 * PATIENCE_S)


def test_a_value_that_is_there_is_read() -> None:
    join = CallingJoin(dist.HashStore())

    async def work() -> bytes:
        await join.put("wish/0", b"norm")
        with anyio.fail_after(PATIENCE_S):
            return await join.get("wish/0")

    assert anyio.run(work) == b"norm"


def test_rank_0_that_waits_for_an_engine_ends_with_the_error_of_another_rank() -> None:
    join = CallingJoin(dist.HashStore())

    async def work() -> None:
        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:

                async def opened() -> None:
                    with pytest.raises(BrokenError, match="MemoryError: rank 1 has no room"):
                        async with open_sender({"norm": torch.zeros(4)}, join, rank=0, ranks=2):
                            raise AssertionError("there is no engine")

                tasks.start_soon(opened)
                await anyio.to_thread.run_sync(join.end, MemoryError("rank 1 has no room"))

    anyio.run(work)
