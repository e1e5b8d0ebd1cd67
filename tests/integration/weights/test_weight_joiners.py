"""Engines that join over a store: the next version comes to each, also to one whose earlier life nobody misses yet."""

from __future__ import annotations

import time
from typing import Any

import pytest
import trio

torch = pytest.importorskip("torch", reason="JOINING ENGINES WERE NOT RUN: torch is not installed")

from asyncfabric import FabricConfig  # noqa: E402
from asyncfabric.control.channels.store import POLL_S  # noqa: E402
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


class CountedStore:
    """A store that counts how often somebody looks for new members."""

    def __init__(self, store: Any) -> None:
        self.store, self.looks = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def add(self, key: str, amount: int) -> int:
        self.looks += key.endswith("/members") and not amount
        return int(self.store.add(key, amount))


@pytest.mark.trio
async def test_a_training_with_many_layouts_looks_at_its_store_once_in_each_interval() -> None:
    store, weight = torch.distributed.HashStore(), torch.zeros(64, 8)
    counted = CountedStore(store)
    kinds = [torch.float32, torch.bfloat16, torch.float16]

    async def live(kind: Any) -> None:
        own = {"w": torch.zeros(64, 8, dtype=kind)}
        async with open_receiver(own, StoreJoin(store), name=str(kind)[6:], config=LOCAL) as receiver:
            while True:
                await receiver.wait()
                receiver.apply()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(live, kinds[0])
            async with open_sender({"w": weight}, StoreJoin(counted), config=LOCAL) as training:
                for kind in kinds[1:]:
                    nursery.start_soon(live, kind)
                version = 0
                while len(training._layouts.publishers) < len(kinds):
                    version += 1
                    await training.publish(version)
                began_s, looks = trio.current_time(), counted.looks
                await trio.sleep(1.0)
                assert counted.looks - looks <= 1.2 * (trio.current_time() - began_s) / POLL_S
                nursery.cancel_scope.cancel()
