"""`asyncfabric serve rollout`: one replica: asks for the blueprint, receives versions, generates with them. Wiring."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from time import monotonic

import torch
import trio
from starlette.applications import Starlette

from asyncfabric import Waiting
from asyncfabric.actors import Membership, Node, Reference
from asyncfabric.control import Link
from asyncfabric.errors import FabricError
from asyncfabric.weights import from_bytes
from asyncfabric.weights.update import WeightReplica, open_replica, receiver_name
from asyncfabric_services.fanout.blueprint import COORDINATOR_ACTOR, FanoutBlueprint, ask_blueprint
from asyncfabric_services.fanout.participant import FanoutParticipant, open_participant
from asyncfabric_services.health.endpoints import node_routes
from asyncfabric_services.health.metrics import BoundedCounter, gauge
from asyncfabric_services.health.view import Row, View
from asyncfabric_services.nodes.link_rows import link_rows
from asyncfabric_services.nodes.stage import Announce, Stage, serve_process
from asyncfabric_services.rollout.fused_model import FusedModel
from asyncfabric_services.rollout.generator import Generator
from asyncfabric_services.settings.schema import Settings

RETRY_SECONDS = 0.2

_log = logging.getLogger(__name__)


class Rollout:
    """One replica of this process, once the blueprint is known."""

    def __init__(self, participant: FanoutParticipant) -> None:
        self.generator: Generator | None = None
        self.replicas: list[WeightReplica] = []
        self._since = monotonic()
        self._participant = participant
        registry = participant.stage.registry
        self._tokens = BoundedCounter(registry, "rollout", "tokens_total", "Tokens generated.")
        gauge(registry, "rollout", "version", "The version that serves, 0 for none.").set_function(self._version)
        gauge(registry, "rollout", "flips", "Versions that served so far.").set_function(lambda: len(self.versions()))
        gauge(registry, "rollout", "torn", "Versions whose weights changed while they served.").set_function(
            lambda: sum(row["torn"] for row in self.versions())
        )
        text = "Whether generation waits while what served is written over (weights.memory in-place)."
        gauge(registry, "rollout", "paused", text).set_function(
            lambda: self.generator is not None and self.generator.paused
        )
        gauge(registry, "rollout", "paused_seconds", "Seconds of all such waits.").set_function(
            lambda: self.generator.paused_s if self.generator is not None else 0.0
        )
        gauge(registry, "rollout", "weight_bytes", "Memory of all copies of the weights.").set_function(
            lambda: sum(row["bytes"] for row in self.ranks())
        )

    def _version(self) -> int:
        return self.generator.version if self.generator is not None else 0

    async def run(self) -> None:
        """Serve until cancelled.

        Cancellation: what arrives drains.
        """
        own = self._participant
        blueprint = await blueprint_of(own.node, own.link, own.membership)
        self._since = monotonic()
        plan = from_bytes(blueprint.plan)
        name, weights = own.stage.condition.name, own.stage.settings.weights
        model = await trio.to_thread.run_sync(lambda: FusedModel(blueprint.model_config(), blueprint.layout))
        async with AsyncExitStack() as stack:
            for receiver in range(plan.receivers):
                channel = own.channels.open(receiver_name(name, receiver))
                opened = open_replica(
                    own.fabric,
                    channel,
                    plan,
                    name,
                    receiver,
                    shadow=weights.memory == "shadow",
                    codings=weights.coding_names,
                )
                self.replicas.append(await stack.enter_async_context(opened))
            self.generator = Generator(model, self.replicas, blueprint.tensors, self._tokens.add)
            nursery = await stack.enter_async_context(trio.open_nursery())
            nursery.start_soon(own.carry_messages)
            await self.generator.run()

    def versions(self) -> list[Row]:
        """Return the versions that served, the present one last."""
        return [one.row() for one in self.generator.served] if self.generator else []

    def ranks(self) -> list[Row]:
        """Return each rank of the replica: its memory, what serves from it, and why it gave up a version last."""
        return [
            {
                "rank": one.receiver,
                "copies": len(one.copies),
                "bytes": len(one.copies) * one.layout.total_bytes,
                "version": one.current_version(),
                "failure": one.refusal or one.failure,
            }
            for one in self.replicas
        ]

    def waits(self) -> list[Waiting]:
        """Return what this replica waits for."""
        if self.generator is None:
            return [Waiting("the replica", "the coordinator's blueprint", 0, 1, ("coordinator",), self._since, {})]
        if refused := next((one.refusal for one in self.replicas if one.refusal), ""):
            return [
                Waiting("the replica", f"a plan that is the coordinator's: {refused}", 0, 1, ("coordinator",), 0.0, {})
            ]
        if self.generator.paused:
            since = self.generator.paused_since
            return [Waiting("generation", "the version that is written in place", 0, 1, ("coordinator",), since, {})]
        if not self.generator.version:
            return [Waiting("the replica", "its first version", 0, 1, ("coordinator",), self._since, {})]
        return self._participant.fabric.why()


async def blueprint_of(node: Node, link: Link, membership: Membership) -> FanoutBlueprint:
    """Return the blueprint, from whichever coordinator has it.

    Cancellation: only this wait ends.
    """
    while True:
        (member, *_) = await membership.wait_for("coordinator")
        try:
            await link.connect(member.address)
            return await ask_blueprint(node, Reference(member.identity, COORDINATOR_ACTOR, 0))
        except FabricError as error:
            _log.info("no blueprint yet: %s", error)
        await trio.sleep(RETRY_SECONDS)


@asynccontextmanager
async def open_service(stage: Stage) -> AsyncIterator[Starlette]:
    """Hold the rollout open.

    Cancellation: see Rollout.run.
    """
    torch.set_num_threads(stage.settings.model.threads)
    async with open_participant(stage) as participant:
        rollout = Rollout(participant)
        participant.nursery.start_soon(rollout.run)
        peers = partial(link_rows, participant.link)
        view = View(rollout.waits, peers, participant.regions, {"versions": rollout.versions, "ranks": rollout.ranks})
        yield Starlette(routes=node_routes(stage.condition, stage.registry, view))


async def serve(settings: Settings, announce: Announce) -> None:
    """Serve until SIGTERM; see serve_process.

    Cancellation: as there.
    """
    await serve_process(settings, "rollout", open_service, announce)
