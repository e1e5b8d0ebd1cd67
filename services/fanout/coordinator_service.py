"""`asyncfabric serve coordinator`: decides which version of the weights serves. No model, no fabric, no torch here."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic

import trio
from starlette.applications import Starlette

from asyncfabric import Waiting
from asyncfabric.actors import open_node
from asyncfabric.control import LinkChannels
from asyncfabric.errors import BrokenError, FabricError
from asyncfabric.weights import from_bytes
from asyncfabric.weights.update import COORDINATOR, WEIGHT_CODEC, WeightChannel, WeightMessage, open_coordinator
from asyncfabric_services.fanout.blueprint import COORDINATOR_ACTOR, WEIGHT_CHANNEL, BlueprintStore, CoordinatorActor
from asyncfabric_services.fanout.update_book import UpdateBook
from asyncfabric_services.health.endpoints import node_routes
from asyncfabric_services.health.metrics import gauge
from asyncfabric_services.health.view import Row, Rows, View
from asyncfabric_services.interruption import failing_as
from asyncfabric_services.nodes.link_rows import link_rows
from asyncfabric_services.nodes.stage import Announce, Stage, open_control, open_directory, serve_process
from asyncfabric_services.router.server import StartError
from asyncfabric_services.settings.schema import Settings

ROLES = ("trainer", "rollout")
BLUEPRINT_SUFFIX = ".blueprint"


class Coordinating:
    """The loop: every version that all trainers offer is brought to all receivers, or to none."""

    def __init__(self, stage: Stage, store: BlueprintStore, path: Path) -> None:
        self.book = UpdateBook(stage.registry)
        self._store = store
        self._path = path
        self._since = monotonic()
        version = gauge(stage.registry, "weights", "committed_version", "The version that was decided last.")
        version.set_function(lambda: store.coordinator.committed if store.coordinator is not None else 0)
        receivers = gauge(stage.registry, "weights", "receivers", "Receivers that are there.")
        receivers.set_function(lambda: len(store.coordinator.receivers) if store.coordinator is not None else 0)
        absent = gauge(stage.registry, "weights", "absent_trainers", "Trainers of the plan that are not there.")
        absent.set_function(lambda: len(store.coordinator.absent) if store.coordinator is not None else 0)

    async def run(self, channel: WeightChannel) -> None:
        """Wait for a blueprint, then coordinate until cancelled.

        Cancellation: an open update is aborted, unless its decision is being written.
        """
        blueprint = await self._store.blueprint()
        async with open_coordinator(channel, from_bytes(blueprint.plan), self._path) as coordinator:
            self._store.coordinator = coordinator
            self._since = monotonic()
            try:
                async for version in coordinator.offers():
                    await self._update(version)
            finally:
                self._store.coordinator = None

    async def _update(self, version: int) -> None:
        coordinator = self._store.coordinator
        assert coordinator is not None
        self._since = monotonic()
        try:
            report = await coordinator.update(version)
        except (BrokenError, ValueError) as error:
            self.book.aborted(version, str(error))
            return
        self.book.committed(report)

    def waits(self) -> list[Waiting]:
        """Return who the open update waits for; and the trainers that are not there, without whom there is none."""
        coordinator = self._store.coordinator
        if coordinator is None:
            return [Waiting("the coordinator", "a trainer's plan", 0, 1, ("trainer-0",), self._since, {})]
        waits: list[Waiting] = []
        if missing := coordinator.awaited:
            total = max(len(missing), len(coordinator.receivers))
            waits.append(
                Waiting("the open update", "its participants", total - len(missing), total, missing, self._since, {})
            )
        elif not coordinator.receivers:
            waits.append(Waiting("the next update", "a rollout", 0, 1, (), 0.0, {}))
        if absent := coordinator.absent:
            total, since = coordinator.trainers, min(absent.values())
            waits.append(Waiting("the next update", "trainers", total - len(absent), total, tuple(absent), since, {}))
        return waits


def log_file(settings: Settings) -> Path:
    """Return the file that decisions are kept in; its folder is made. Raises StartError where it cannot be written."""
    path = settings.weights.log
    if path is None:
        raise StartError("weights.log is empty: give the file that decisions are kept in")
    if path.is_dir():
        raise StartError(f"weights.log is the folder {path}: give a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(f"weights.log: the folder of {path} cannot be made: {error.strerror}") from error
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise StartError(f"weights.log: {path} cannot be written: permission denied")
    return path


@asynccontextmanager
async def open_service(stage: Stage) -> AsyncIterator[Starlette]:
    """Hold the coordinator open.

    Cancellation: see Coordinating.run.
    """
    path = log_file(stage.settings)
    try:
        store = BlueprintStore(path.with_name(path.name + BLUEPRINT_SUFFIX))
    except OSError as error:
        raise StartError(f"the blueprint beside {path} cannot be read: {error}") from error
    coordinating = Coordinating(stage, store, path)
    async with open_control(stage) as link, open_node(stage.condition.name, link) as node:
        channels = LinkChannels(link, WEIGHT_CODEC, channel=WEIGHT_CHANNEL)
        channel = channels.open(COORDINATOR)
        await node.spawn(CoordinatorActor, store, name=COORDINATOR_ACTOR)
        async with open_directory(stage, link, {}) as directory, trio.open_nursery() as nursery:
            nursery.start_soon(channels.run, directory, ROLES)
            nursery.start_soon(coordinating.run, channel)
            more: dict[str, Rows] = {
                "updates": coordinating.book.rows,
                "participants": lambda: _participants(channels, store),
            }
            view = View(waits=coordinating.waits, peers=lambda: link_rows(link), more=more)
            yield Starlette(routes=node_routes(stage.condition, stage.registry, view))
            nursery.cancel_scope.cancel()


def _participants(channels: LinkChannels[WeightMessage], store: BlueprintStore) -> list[Row]:
    refused = store.coordinator.refused if store.coordinator is not None else {}
    return [{"name": name, "node": node, "refused": refused.get(name, "")} for name, node in channels.known.items()]


async def serve(settings: Settings, announce: Announce) -> None:
    """Serve until SIGTERM; see serve_process.

    Cancellation: as there.
    """
    with failing_as((FabricError, lambda error: StartError(f"the coordinator ended: {error}"))):
        await serve_process(settings, "coordinator", open_service, announce)
