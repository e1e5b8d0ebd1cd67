"""Trainers, replicas, a coordinator in one process, each with a fabric: what tests of updates are written in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import anyio
import numpy as np

import asyncfabric as af
from asyncfabric.control import LocalChannels
from asyncfabric.weights import (
    Mesh,
    Move,
    Plan,
    Relay,
    ReplicaMemory,
    Shard,
    alone,
    execute,
    fused,
    place,
    plan_weights,
)
from asyncfabric.weights.messages import Written
from asyncfabric.weights.update import (
    COORDINATOR,
    WEIGHT_CODEC,
    PublishReport,
    UpdateReport,
    WeightCoordinator,
    WeightPublisher,
    WeightReplica,
    open_coordinator,
    open_publisher,
    open_replica,
    receiver_name,
    trainer_name,
)

PATIENCE_S = 90.0
SCRATCH = 96 << 20


@dataclass
class Fixture:
    """Who is there. `shards[rank][parameter]` is the trainers' memory."""

    plan: Plan
    post: LocalChannels[Any]
    coordinator: WeightCoordinator
    publishers: list[WeightPublisher]
    shards: list[dict[str, Any]]
    replicas: dict[str, WeightReplica]
    fabrics: dict[str, af.Fabric]
    reports: list[PublishReport] = field(default_factory=list)

    async def update(self, version: int) -> UpdateReport:
        """Every trainer publishes, the coordinator updates; raises what the coordinator raises."""
        failures: list[Exception] = []
        failure: Exception | None = None

        async def publish(publisher: WeightPublisher) -> None:
            try:
                self.reports.append(await publisher.publish(version))
            except af.FabricError as error:
                failures.append(error)

        async with anyio.create_task_group() as tasks:
            for publisher in self.publishers:
                tasks.start_soon(publish, publisher)
            try:
                report = await self.coordinator.update(version)
            except af.FabricError as error:
                failure = error
        if failure is not None:
            assert len(failures) == len(self.publishers), "a trainer took an aborted version for decided"
            raise failure
        assert not failures, failures
        return report

    async def bring(self, version: int) -> UpdateReport:
        """Update, let it serve everywhere, and check it."""
        report = await self.update(version)
        await self.flip(version)
        self.check(version)
        return report

    async def begin(self) -> dict[tuple[str, int], dict[str, Any]]:
        """Let version 1 serve and take other weights; return what serves."""
        await self.update(1)
        await self.flip(1)
        before = self.expected()
        self.change(1)
        return before

    def kill_at(self, name: str, word: type) -> None:
        """Let a receiver die when it receives such a word for the first time; it is none of `replicas` any more."""
        victim = self.replicas.pop(name)._versions
        hand_over = victim._hand_over

        def die(sender: str, message: Any) -> None:
            if isinstance(message, word):
                victim._hand_over = lambda *_: None  # type: ignore[method-assign]
                self.post.close(name, "killed")
                return
            hand_over(sender, message)

        victim._hand_over = die  # type: ignore[method-assign]
        take_written = victim._take_written

        def die_of_written(reports: list[tuple[str, Any]]) -> bool:
            if reports and word is Written:
                victim._take_written = lambda reports: False  # type: ignore[method-assign]
                self.post.close(name, "killed")
                return False
            return take_written(reports)

        victim._take_written = die_of_written  # type: ignore[method-assign]

    async def flip(self, version: int) -> None:
        """Let a version serve everywhere."""
        for replica in self.replicas.values():
            await replica.wait_version(version)
            assert replica.step_boundary() == version == replica.current_version()

    def expected(self) -> dict[tuple[str, int], dict[str, Any]]:
        """What the reference writes, from the trainers' memory as it is now."""
        names = {replica.name for replica in self.replicas.values()}
        have = [one.name for one in self.plan.replicas]
        assert names <= set(have)
        memory = ReplicaMemory(self.plan)
        execute(self.plan, lambda rank, name: self.shards[rank][name], memory)
        found: dict[tuple[str, int], dict[str, Any]] = {}
        for (name, receiver, region), tensor in memory.tensors.items():
            found.setdefault((name, receiver), {})[region] = tensor
        return found

    def check(self, version: int, expected: dict[tuple[str, int], dict[str, Any]] | None = None) -> None:
        """Every replica serves this version, bit for bit."""
        expected = self.expected() if expected is None else expected
        for replica in self.replicas.values():
            assert replica.current_version() == version
            tensors = replica.tensors()
            wanted = expected.get((replica.name, replica.receiver), {})  # a receiver may have nothing
            assert set(tensors) == set(wanted)
            for region, tensor in wanted.items():
                assert np.array_equal(on_host(tensors[region]), tensor), f"{replica.name}/{replica.receiver}: {region}"

    def change(self, seed: int) -> None:
        """Another training step: other weights in the same memory, equal where shards overlap."""
        for shard in self.shards:
            for array in shard.values():
                view = array.reshape(-1).view(np.uint8)
                view ^= np.uint8(seed & 1)  # the lowest mantissa bits: stays finite, the same for each copy

    def nudge(self, seed: int) -> None:
        """A training step that changes few weights, by little; which ones depends on their values alone."""
        for shard in self.shards:
            for array in shard.values():
                view = array.reshape(-1).view(np.uint8)
                view[view % 61 == seed % 61] ^= 1


def on_host(tensor: Any) -> Any:
    """Return the bytes of a served tensor as an array."""
    return tensor if isinstance(tensor, np.ndarray) else tensor.cpu().numpy()


def shards_of(plan: Plan, rank: int, shard: Callable[[int, str], Any]) -> dict[str, Any]:
    """What a trainer of the plan holds."""
    pairs = set(zip(plan.move_kind.tolist(), plan.move_parameter.tolist(), strict=True))
    return {
        plan.parameters[name]: np.ascontiguousarray(shard(rank, plan.parameters[name]))
        for kind, name in sorted(pairs)
        if rank in plan.sources[plan.kinds[kind].source].ranks
    }


@asynccontextmanager
async def open_fixture(
    plan: Plan,
    shard: Callable[[int, str], Any],
    log: Path,
    *,
    rail: str | Callable[[str], str] = "local",
    shadow: Callable[[str], bool] = lambda name: True,
    scratch_bytes: int = SCRATCH,
    grace_s: float = 5.0,
    config: dict[str, Any] | None = None,
    codings: Sequence[str] = (),
    coding: Literal["auto", "always"] = "auto",
    reads: Callable[[str], dict[str, Any]] = lambda name: {},
    given: Callable[[int, dict[str, Any]], Any] = lambda rank, held: held,
) -> AsyncIterator[Fixture]:
    """Open everybody that the plan names.

    `codings` for all, `reads` is what a receiver is opened with instead; `given` makes of a trainer's arrays what it
    is opened with.
    """
    post = LocalChannels(WEIGHT_CODEC)
    async with AsyncExitStack() as stack:

        async def fabric(name: str) -> af.Fabric:
            wanted: dict[str, Any] = {
                "rails": (rail if isinstance(rail, str) else rail(name),),
                "peer_deadline_host": 30.0,
                "peer_deadline_network": 30.0,
            } | (config or {})
            return await stack.enter_async_context(af.open_fabric(af.FabricConfig(**wanted)))

        coordinator = await stack.enter_async_context(
            open_coordinator(post.open(COORDINATOR), plan, log, grace_s=grace_s)
        )
        fixture = Fixture(plan, post, coordinator, [], [], {}, {})
        for one in plan.replicas:
            for receiver in range(plan.receivers):
                name = receiver_name(one.name, receiver)
                fixture.fabrics[name] = await fabric(name)
                fixture.replicas[name] = await stack.enter_async_context(
                    open_replica(
                        fixture.fabrics[name],
                        post.open(name),
                        plan,
                        one.name,
                        receiver,
                        shadow=shadow(name),
                        **({"codings": codings, "coding": coding} | reads(name)),
                    )
                )
        for rank in range(plan.trainers):
            name = trainer_name(rank)
            held = shards_of(plan, rank, shard)
            fixture.fabrics[name] = await fabric(name)
            fixture.shards.append(held)
            fixture.publishers.append(
                await stack.enter_async_context(
                    open_publisher(
                        fixture.fabrics[name],
                        post.open(name),
                        plan,
                        rank,
                        given(rank, held),
                        scratch_bytes=scratch_bytes,
                        codings=codings,
                        coding=coding,
                    )
                )
            )
        await coordinator.wait_receivers(fixture.replicas)
        yield fixture


def run(body: Callable[[], Awaitable[None]], backend: str = "trio") -> None:
    """Run a test's body with a deadline."""

    async def bounded() -> None:
        with anyio.fail_after(PATIENCE_S):
            await body()

    anyio.run(bounded, backend=backend)


SHAPE = (256, 384)


def small_plan(
    trainers: int = 2, receivers: int = 2, names: tuple[str, ...] = ("a", "b"), relay: Relay | None = None
) -> Plan:
    """Two fused matrices, quantised, and one that is copied as it is; FSDP to TP."""
    trainer, replica = Mesh.of({"fsdp": trainers}), Mesh.of({"tp": receivers})
    rows, split = {"fsdp": Shard(0)}, {"tp": Shard(0)}
    held = place(SHAPE, trainer, rows)
    gate_up = fused([place(SHAPE, replica, split), place(SHAPE, replica, split)])
    moves = [
        Move(name, "bfloat16", held, "gate_up", "float8_e4m3fn", target, 128)
        for name, target in zip(("gate", "up"), gate_up, strict=True)
    ]
    moves.append(Move("down", "bfloat16", held, "down", "bfloat16", alone(place(SHAPE, replica, {"tp": Shard(1)}))))
    return plan_weights(moves, trainers=trainers, receivers=receivers, replicas=names, relay=relay, chunk_bytes=1 << 14)


def random_shard(rank: int, name: str) -> Any:
    seed = int.from_bytes(name.encode(), "little") * 1009 + rank
    values = np.random.default_rng(seed).standard_normal((SHAPE[0] // 2, SHAPE[1])).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype("<u2")
