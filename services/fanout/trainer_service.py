"""`asyncfabric serve trainer`: one rank of a training that publishes its weights every few steps. Wiring and the loop.

The loop runs on the event loop, steps on a worker thread, one at a time. Ranks agree after every few steps which
version comes next and whether one of them is to end, so all do the same things in the same order.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import trio
from safetensors import SafetensorError
from starlette.applications import Starlette
from torch import Tensor

from asyncfabric import Waiting
from asyncfabric.actors import Membership, Node, Reference
from asyncfabric.errors import BrokenError, FabricError
from asyncfabric.weights import (
    Holding,
    Plan,
    ReplicaLayout,
    card_of,
    causal_moves,
    held_by,
    local_tensors,
    plan_weights,
    to_bytes,
)
from asyncfabric.weights.update import WeightPublisher, open_publisher, trainer_name
from asyncfabric_services.exits import CheckFailed
from asyncfabric_services.fanout.blueprint import COORDINATOR_ACTOR, FanoutBlueprint, Next, send_blueprint
from asyncfabric_services.fanout.participant import FanoutParticipant, open_participant
from asyncfabric_services.health.endpoints import node_routes
from asyncfabric_services.health.metrics import BoundedCounter, gauge
from asyncfabric_services.health.view import Row, View
from asyncfabric_services.interruption import failing_as
from asyncfabric_services.nodes.link_rows import link_rows
from asyncfabric_services.nodes.stage import Announce, Stage, serve_process
from asyncfabric_services.rollout.fused_model import refuse_uncomputable
from asyncfabric_services.router.server import StartError
from asyncfabric_services.runner.model import ModelChoice, load_model
from asyncfabric_services.settings.schema import Settings
from asyncfabric_services.trainer.checkpoints import fault_of, load_version, restore, save_version, versions_in
from asyncfabric_services.trainer.training import Training
from asyncfabric_services.trainer.world import all_gather_bytes, join_world, leave_world, sum_over_ranks

PUBLISH_SECONDS = 30.0  # ranks that learn at different times of a lost coordinator would wait for each other for ever
LOOK_SECONDS = 0.2
LATE_SECONDS = 1.0  # a step that took so long, and so many times as long as any before, is shown by /why
LATE_TIMES = 3.0
MOST_ROWS = 1024
Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)


async def _blocking(work: Callable[..., Answer], *arguments: Any) -> Answer:
    """Run on a worker thread that a cancelled rank leaves behind: it may wait for ranks that are gone."""
    return await trio.to_thread.run_sync(work, *arguments, abandon_on_cancel=True)


class Together:
    """Notes how long what all ranks do together takes: `with` around each time. Event loop's thread."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._longest = 0.0

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self._began is not None:
            self._longest = max(self._longest, time.monotonic() - self._began)
        self._began = None

    def late(self) -> float | None:
        """Return since when the one under way has been awaited, if that is far longer than any before; else None."""
        began = self._began
        if began is None or time.monotonic() - began <= max(LATE_SECONDS, LATE_TIMES * self._longest):
            return None
        return began


class TrainerRank:
    """One rank: what it trains, what it published."""

    def __init__(self, stage: Stage) -> None:
        """Join the other ranks and make the model; blocking. Raises StartError when that cannot be done."""
        self.rows: list[Row] = []
        self.ended = trio.Event()
        self._stage = stage
        self._since = 0.0  # when the version began that is being published
        self._together = Together()
        settings = stage.settings
        try:
            self.rank, self.ranks, self._device = join_world(_device_of(settings.cluster.rails))
            layout = ReplicaLayout(
                ranks=settings.weights.ranks, tp=settings.weights.tp, fp8=settings.weights.form == "float8"
            )
            self.training, config = self._loaded()
            refuse_uncomputable(config)
            everybody = all_gather_bytes(msgspec.msgpack.encode(self.training.holdings()))
            held = held_by([msgspec.msgpack.decode(one, type=list[Holding]) for one in everybody])
            moves = causal_moves(held, card_of(config), layout)
            self.plan: Plan = plan_weights(moves, trainers=self.ranks, receivers=layout.ranks, replicas=())
        except (ValueError, RuntimeError, OSError) as error:
            raise StartError(f"the trainer cannot start: {error}") from error
        tensors = [local_tensors(moves, receiver) for receiver in range(layout.ranks)]
        self.blueprint = FanoutBlueprint(to_bytes(self.plan), json.dumps(config.to_dict()), layout, tensors)
        self._published = BoundedCounter(
            stage.registry, "weights", "published_total", "Versions offered.", outcome=("committed", "aborted")
        )
        self._version = gauge(stage.registry, "weights", "published_version", "The last that was decided, 0 for none.")
        self._bytes = BoundedCounter(
            stage.registry, "weights", "published_bytes_total", "Of committed versions.", what=("sent", "saved")
        )
        steps = gauge(stage.registry, "training", "steps", "Steps since this process began.")
        steps.set_function(lambda: self.training.steps)
        gauge(stage.registry, "training", "loss", "Of the last step.").set_function(lambda: self.training.loss)

    def _loaded(self) -> tuple[Training, Any]:
        model, folder = self._stage.settings.model, self._stage.settings.train.checkpoints
        torch.set_num_threads(model.threads)
        choice = ModelChoice(
            path=model.path,
            layers=model.layers,
            hidden=model.hidden,
            query_heads=model.query_heads,
            kv_heads=model.kv_heads,
            max_tokens=model.max_tokens,
            seed=model.seed,
        )
        made = load_model(choice, page_tokens=1).model.to(torch.float32)
        fault = fault_of(folder) if folder is not None and self.rank == 0 else ""
        kept = versions_in(folder) if folder is not None and not fault else []
        everybody = all_gather_bytes(msgspec.msgpack.encode((fault, kept)))
        seen = [msgspec.msgpack.decode(one, type=tuple[str, list[int]]) for one in everybody]
        if seen[0][0]:
            raise ValueError(f"train.checkpoints: {seen[0][0]}")
        if any(theirs != kept for _, theirs in seen):
            raise ValueError(f"ranks do not see the same checkpoints in {folder}")
        if folder is not None and kept:
            restore(made, load_version(folder, kept[-1]))
        return Training(made, device=self._device), made.config

    async def run(self, publisher: WeightPublisher, node: Node, membership: Membership) -> None:
        """Train and publish until a rank is asked to stop.

        Raises BrokenError when another rank is gone.

        Cancellation: at once; a step in progress is left behind.
        """
        train, stage = self._stage.settings.train, self._stage
        while True:
            try:
                for _ in range(train.every):
                    with self._together:
                        await _blocking(self.training.step)
                wanted = await self._next(node, membership) if self.rank == 0 else 0
                with self._together:
                    version, stopping = await _blocking(sum_over_ranks, wanted, int(stage.stop.is_set()))
                if stopping:
                    break
                if version and train.checkpoints is not None:
                    state = await _blocking(self.training.whole_state)
                    if self.rank == 0:
                        await self._keep(train.checkpoints, version, state)
            except RuntimeError as error:
                raise BrokenError(
                    f"another rank of the training is gone: {error}", remedy="start all ranks again"
                ) from error
            if version:
                await self._publish(publisher, version)
        await _blocking(leave_world)
        stage.stop.set()
        self.ended.set()

    async def _keep(self, folder: Path, version: int, state: dict[str, Tensor]) -> None:
        try:
            await _blocking(save_version, folder, version, state)
        except (OSError, SafetensorError) as error:
            raise BrokenError(
                f"version {version} cannot be kept in {folder}, so it is not published: {error}",
                remedy="make room there; a training goes on from its last version when all ranks are started again",
            ) from error

    async def keep_informed(self, own: FanoutParticipant) -> None:
        """Send every coordinator the blueprint, for ever; rank 0 does.

        Cancellation: only this ends.
        """
        informed: set[Any] = set()
        while True:
            for member in own.membership.members("coordinator"):
                if member.identity in informed:
                    continue
                try:
                    await own.link.connect(member.address)
                    await send_blueprint(own.node, Reference(member.identity, COORDINATOR_ACTOR, 0), self.blueprint)
                    informed.add(member.identity)
                except FabricError as error:
                    _log.warning("the coordinator does not take the blueprint: %s", error)
            await trio.sleep(LOOK_SECONDS)

    def waits(self, publisher: WeightPublisher) -> list[Waiting]:
        """Return what the version that is being published waits for, or the step that takes far longer than others."""
        awaited = publisher.awaited
        if awaited is None:
            since, others = self._together.late(), tuple(trainer_name(each) for each in range(self.ranks))
            step = f"step {self.training.steps + 1} with the other ranks"
            names = tuple(name for name in others if name != trainer_name(self.rank))
            return [] if since is None or not names else [Waiting("the training", step, 0, 1, names, since, {})]
        return [Waiting("the version", awaited.what, 0, len(awaited.names), awaited.names, self._since, {})]

    async def _next(self, node: Node, membership: Membership) -> int:
        for member in membership.members("coordinator"):
            try:
                return await node.ask(Reference(member.identity, COORDINATOR_ACTOR, 0), Next())
            except FabricError as error:
                _log.info("no coordinator answers which version comes next: %s", error)
        return 0

    async def _publish(self, publisher: WeightPublisher, version: int) -> None:
        row: Row = {"version": version, "step": self.training.steps, "loss": round(self.training.loss, 6)}
        reason = f"it was not decided within {PUBLISH_SECONDS} s"
        self._since = time.monotonic()
        with trio.move_on_after(PUBLISH_SECONDS):
            try:
                report = await publisher.publish(version)
                reason = ""
                self._version.set(version)
                self._bytes.add(report.sent_bytes, what="sent")
                self._bytes.add(sum(max(0, each.saved_bytes) for each in report.codings), what="saved")
                row |= {
                    "seconds": round(report.seconds, 6),
                    "wait_s": round(report.wait_s, 6),
                    "write_s": round(report.write_s, 6),
                    "decide_s": round(report.decide_s, 6),
                    "stages": _plain(report.stages),
                    "codings": [asdict(each) for each in report.codings],
                }
            except BrokenError as error:
                reason = str(error)
        if reason:
            _log.warning("version %d: %s", version, reason)
        self._published.add(outcome="aborted" if reason else "committed")
        self.rows.append(row | {"outcome": "aborted", "reason": reason} if reason else row | {"outcome": "committed"})
        del self.rows[:-MOST_ROWS]


def _device_of(rails: str) -> str:
    """Return where a trainer of these rails trains: on the GPU of a cuda rail that is named, else on the CPU."""
    first = rails.removeprefix("auto,").split(",")[0].partition("?")[0]
    return first if first.startswith("cuda:") else "cpu"


def _plain(value: Any) -> Any:
    return {name: round(each, 6) if isinstance(each, float) else each for name, each in asdict(value).items()}


@asynccontextmanager
async def open_service(stage: Stage) -> AsyncIterator[Starlette]:
    """Hold the rank open.

    Cancellation: what was posted drains; a step in progress is left behind.
    """
    one = await _blocking(TrainerRank, stage)
    async with open_participant(stage) as own:
        channel = own.channels.open(trainer_name(one.rank))
        own.nursery.start_soon(own.carry_messages)
        if one.rank == 0:
            own.nursery.start_soon(one.keep_informed, own)
        names, arrays = stage.settings.weights.coding_names, one.training.arrays()
        async with (
            open_publisher(own.fabric, channel, one.plan, one.rank, arrays, codings=names) as publisher,
            trio.open_nursery() as working,
        ):
            working.start_soon(one.run, publisher, own.node, own.membership)

            def why() -> list[Waiting]:
                return [*one.waits(publisher), *own.fabric.why()]

            view = View(why, partial(link_rows, own.link), own.regions, {"published": lambda: one.rows})
            yield Starlette(routes=node_routes(stage.condition, stage.registry, view))
            with trio.move_on_after(stage.settings.http.drain):
                await one.ended.wait()
            working.cancel_scope.cancel()


async def serve(settings: Settings, announce: Announce) -> None:
    """Serve until SIGTERM; see serve_process. Raises CheckFailed when another rank, or room for a version, is gone.

    Cancellation: as there.
    """
    # The world's fault: a rank that is gone takes each of the others along.
    with failing_as((BrokenError, lambda error: CheckFailed(str(error)))):
        await serve_process(settings, "trainer", open_service, announce)
