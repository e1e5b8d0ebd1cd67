"""The ranks of a replica change together, also when an update ends while its rollout is about to stop for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

torch = pytest.importorskip("torch", reason="NO TRAINING: torch is not installed")
pytest.importorskip("transformers", reason="NO TRAINING: transformers is not installed")

from trained import Filled, model_of  # noqa: E402

import asyncfabric as af  # noqa: E402
from asyncfabric.control import LocalChannels  # noqa: E402
from asyncfabric.weights import ReplicaLayout  # noqa: E402
from asyncfabric.weights.messages import Abort  # noqa: E402
from asyncfabric.weights.tensors import arrays_of, holdings  # noqa: E402
from asyncfabric.weights.update import (  # noqa: E402
    COORDINATOR,
    WEIGHT_CODEC,
    WeightChannel,
    open_coordinator,
    open_publisher,
    open_replica,
    receiver_name,
    trainer_name,
)
from asyncfabric_services.rollout import generator as generator_room  # noqa: E402
from asyncfabric_services.rollout.generator import Generator  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
NAMES = [receiver_name(replica, rank) for replica in "ab" for rank in range(2)]


class Late:
    """A messenger that learns of an abort when it is allowed to."""

    def __init__(self, inner: WeightChannel) -> None:
        self.allowed = trio.Event()
        self._inner = inner

    async def send(self, to: str, message: Any) -> None:
        await self._inner.send(to, message)

    async def receive(self) -> tuple[str, Any]:
        sender, event = await self._inner.receive()
        if isinstance(event, Abort):
            await self.allowed.wait()
        return sender, event

    def take_nowait(self) -> list[tuple[str, Any]]:
        return []


async def flip_always(replica: Any) -> None:
    while True:
        replica.step_boundary()
        await replica.wait_changed()


def test_an_abort_that_one_rank_learns_of_first_stops_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by reading: one rank served on and the other stopped, which ended the rollout with an InternalError."""
    model = model_of("llama")
    state = model.state_dict()
    filled = Filled("llama", [holdings(state, 0)], ReplicaLayout(ranks=2, tp=2))
    digest_of, calls = generator_room.bytes_digest, 0

    async def body() -> None:
        post = LocalChannels(WEIGHT_CODEC)
        late = Late(post.open("b/1"))
        config = af.FabricConfig(rails=("local",))
        async with (
            af.open_fabric(config) as fabric,
            af.open_fabric(config) as other,
            open_coordinator(post.open(COORDINATOR), filled.plan, tmp_path / "log") as coordinator,
            open_replica(other, post.open("a/0"), filled.plan, "a", 0) as a0,
            open_replica(other, post.open("a/1"), filled.plan, "a", 1) as a1,
            open_replica(other, post.open("b/0"), filled.plan, "b", 0, shadow=False) as b0,
            open_replica(other, late, filled.plan, "b", 1, shadow=False) as b1,
            open_publisher(fabric, post.open(trainer_name(0)), filled.plan, 0, arrays_of(state, 0)) as publisher,
            trio.open_nursery() as nursery,
        ):
            await coordinator.wait_receivers(NAMES)
            cut = trio.CancelScope()

            async def abort() -> None:
                cut.cancel()
                while b0.waits_for_boundary:
                    await trio.testing.wait_all_tasks_blocked()

            def digest(ranks: Any) -> str:
                nonlocal calls
                calls += 1
                if calls == 2:  # version 1 is looked at for the last time before the ranks stop for version 2
                    trio.from_thread.run(abort)
                return digest_of(ranks)

            async def bring(version: int) -> None:
                async with trio.open_nursery() as both:
                    both.start_soon(publisher.publish, version)
                    both.start_soon(coordinator.update, version)

            monkeypatch.setattr(generator_room, "bytes_digest", digest)
            tokens, generated = 0, trio.Event()

            def count(more: int) -> None:
                nonlocal tokens, generated
                tokens += more
                generated.set()
                generated = trio.Event()

            async def generate(more: int, least_version: int = 1) -> None:
                wanted = tokens + more
                while tokens < wanted or rollout.version < least_version:
                    await generated.wait()

            rollout = Generator(filled.model, [b0, b1], filled.locals, count)
            nursery.start_soon(flip_always, a0)
            nursery.start_soon(flip_always, a1)
            nursery.start_soon(rollout.run)
            await bring(1)
            await generate(1)

            async def doomed() -> None:
                with pytest.raises(af.BrokenError):
                    await coordinator.update(2)

            async with trio.open_nursery() as both:
                both.start_soon(doomed)
                with cut:
                    await publisher.publish(2)
            await generate(3)
            assert rollout.version == 1 and not rollout.paused and calls == 2, "nobody stopped for what was aborted"
            late.allowed.set()
            await bring(3)
            await generate(1, least_version=3)
            assert [row.version for row in rollout.served] == [1, 3]
            assert [row.torn for row in rollout.served] == [False, False]
            assert [row.paused_s > 0 for row in rollout.served] == [False, True]
            nursery.cancel_scope.cancel()

    trio.run(body)
