"""Engines that join over a store: the next version comes to each, also to one whose earlier life nobody misses yet."""

from __future__ import annotations

import time
from typing import Any

import pytest
import trio

torch = pytest.importorskip("torch", reason="JOINING ENGINES WERE NOT RUN: torch is not installed")

from asyncfabric import FabricConfig  # noqa: E402
from asyncfabric.weights.sessions import StoreJoin, open_receiver, open_sender  # noqa: E402

LOCAL = FabricConfig(rails=("local",))


class Line:
    """The line of one process to a store, which may be cut, and be slow: in sending, or in finding new members."""

    def __init__(self, store: Any, slow_s: float = 0.0) -> None:
        self.store, self.slow_s, self.cut = store, slow_s, False

    def __getattr__(self, name: str) -> Any:
        if name == "clone":
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            if self.cut:
                raise RuntimeError("the line is cut")
            if (name == "set" and "/message/" in arguments[0]) or (name == "add" and arguments[0].endswith("/members")):
                time.sleep(self.slow_s)
            return getattr(self.store, name)(*arguments)

        return call


@pytest.mark.trio
@pytest.mark.parametrize("slow", ["engine", "training"])
async def test_the_next_version_comes_to_an_engine_that_began_anew_under_its_name(slow: str) -> None:
    """The earlier life was cut off, and the training still counts on it when the later one is there."""
    store, weight = torch.distributed.HashStore(), torch.zeros(64, 8)
    slow_s = {slow: 0.1}

    async def published(training: Any, version: int) -> set[str]:
        weight.fill_(float(version))
        return {name.partition("/")[0] for name in (await training.publish(version)).receivers}

    async def serve(line: Line, name: str, task_status: Any) -> None:
        own = torch.zeros(64, 8)
        async with open_receiver({"w": own}, StoreJoin(line, deadline_s=30.0), name=name, config=LOCAL) as receiver:
            task_status.started()
            while True:
                await receiver.wait()
                receiver.apply()

    async def live(line: Line, name: str, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        try:
            await serve(line, name, task_status)
        except* Exception as group:
            assert line.cut, group

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            first = Line(store)
            nursery.start_soon(live, Line(store), "steady")
            line = Line(store, slow_s.get("training", 0.0))
            async with open_sender({"w": weight}, StoreJoin(line, deadline_s=30.0), config=LOCAL) as training:
                await nursery.start(live, first, "restarted")
                assert await published(training, 1) == {"steady", "restarted"}
                first.cut = True
                await nursery.start(live, Line(store, slow_s.get("engine", 0.0)), "restarted")
                assert await published(training, 2) == {"steady", "restarted"}
                nursery.cancel_scope.cancel()
