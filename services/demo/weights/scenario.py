"""The scenario of the demo: a training publishes, two rollouts serve, one is killed, one joins late.

Runs on the event loop. Each step waits for versions, so it happens while updates go on, on machines of any speed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from asyncfabric_services.demo.nodes import metrics_of, open_nodes, page_of, plan_of
from asyncfabric_services.launch.local import LocalLauncher, free_port
from asyncfabric_services.launch.local_node import LocalNode

LOOK_SECONDS = 0.05
STEPS = {"cpu": 2, "cuda": 100}
"""Steps of the training for a version: so many that a rollout that joins late, for seconds, misses few of them."""
Reporter = Callable[[str], None]
Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Sizes of the demo.

    Attributes:
        provider: rail.
        device: of the trainers: "cpu"; or "cuda", a GPU each, whose rails bring the weights to rollouts in host memory.
        trainers: ranks of the training.
        layers, hidden: of the random model.
        form: bfloat16 or float8.
        tp: ranks of a replica.
        versions: at least so many are committed.
        threads: of each process.
    """

    provider: str = "local"
    device: str = "cpu"
    trainers: int = 2
    layers: int = 2
    hidden: int = 256
    form: str = "float8"
    tp: int = 2
    versions: int = 6
    threads: int = 1


@dataclass(slots=True)
class WeightsObserved:
    """What the scenario observed.

    Attributes:
        updates: rows of the coordinator.
        published: rows of each trainer, by name.
        served: versions that each surviving rollout served, by name.
        dirty_ends: nodes that were asked to end and did not end with status 0.
    """

    updates: Rows = field(default_factory=list)
    published: dict[str, Rows] = field(default_factory=dict)
    served: dict[str, Rows] = field(default_factory=dict)
    dirty_ends: list[str] = field(default_factory=list)


def environment_of(scenario: Scenario, folder: Path) -> dict[str, str]:
    """Return the settings of the nodes as environment variables; files go to the folder."""
    values = {
        "MODEL__LAYERS": scenario.layers,
        "MODEL__HIDDEN": scenario.hidden,
        "MODEL__QUERY_HEADS": 4,
        "MODEL__KV_HEADS": 4,
        "MODEL__THREADS": scenario.threads,
        "TRAIN__EVERY": STEPS[scenario.device],
        "TRAIN__CHECKPOINTS": folder / "checkpoints",
        "WEIGHTS__RANKS": scenario.tp,
        "WEIGHTS__TP": scenario.tp,
        "WEIGHTS__FORM": scenario.form,
        "WEIGHTS__LOG": folder / "decisions",
        "CLUSTER__RAILS": "cuda:0" if scenario.device == "cuda" else scenario.provider,
        "LOG__LEVEL": "warning",
    }
    return {f"ASYNCFABRIC_{name}": str(value) for name, value in values.items()}


def torchrun_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return what torchrun would set for a rank of this machine."""
    return {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def rails_of(scenario: Scenario, rank: int) -> dict[str, str]:
    """Return the setting of a trainer's own rails, if it has some."""
    return {"ASYNCFABRIC_CLUSTER__RAILS": f"cuda:{rank}"} if scenario.device == "cuda" else {}


async def play(scenario: Scenario, folder: Path, report: Reporter) -> WeightsObserved:
    """Play the scenario and return what became of it; checkpoints are left in the folder.

    Raises:
        BrokenError: a node did not start; the text has its log.

    Cancellation: all nodes are ended.
    """
    observed = WeightsObserved()
    async with open_nodes(environment_of(scenario, folder)) as launcher:
        await launcher.start(plan_of("directory"))
        port = free_port()
        trainers = tuple(f"trainer-{rank}" for rank in range(scenario.trainers))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(launcher.start, plan_of("coordinator"))
            for name in ("rollout-1", "rollout-2"):
                nursery.start_soon(launcher.start, plan_of(name))
            for rank, name in enumerate(trainers):
                more = torchrun_variables(rank, scenario.trainers, port) | rails_of(scenario, rank)
                nursery.start_soon(launcher.start, plan_of(name, more))
        report(f"{', '.join(trainers)}, a coordinator and 2 rollouts are there")
        for name in ("rollout-1", "rollout-2"):
            await until_metric(launcher.running[name], "asyncfabric_rollout_version", 1)
        first = await _committed(launcher)
        report(f"both rollouts generate with version {first}")
        await _until_committed(launcher, first + 1)
        await launcher.kill("rollout-2")
        at = await _committed(launcher)
        report(f"killed rollout-2 at version {at}")
        await _until_committed(launcher, at + 2)
        await launcher.start(plan_of("rollout-3"))
        await until_metric(launcher.running["rollout-3"], "asyncfabric_rollout_version", 1)
        at = await _committed(launcher)
        report(f"rollout-3 joined and serves; version {at} is committed")
        await _until_committed(launcher, max(at + 1, scenario.versions))
        observed.published = {name: await rows_of(launcher.running[name], "published") for name in trainers}
        for name in trainers:  # ranks agree to end together
            if await (launcher.end(name) if name == trainers[0] else launcher.ended(name)) != 0:
                observed.dirty_ends.append(name)
        last = await _committed(launcher)
        report(f"drained the training after version {last}")
        for name in ("rollout-1", "rollout-3"):
            await until_metric(launcher.running[name], "asyncfabric_rollout_version", last)
            observed.served[name] = await rows_of(launcher.running[name], "versions")
            if await launcher.end(name) != 0:
                observed.dirty_ends.append(name)
        observed.updates = await rows_of(launcher.running["coordinator"], "updates")
        if await launcher.end("coordinator") != 0:
            observed.dirty_ends.append("coordinator")
    return observed


async def _committed(launcher: LocalLauncher) -> int:
    metrics = await metrics_of(launcher.running["coordinator"])
    return round(metrics["asyncfabric_weights_committed_version"])


async def _until_committed(launcher: LocalLauncher, version: int) -> None:
    await until_metric(launcher.running["coordinator"], "asyncfabric_weights_committed_version", version)


async def until_metric(node: LocalNode, metric: str, least: float) -> None:
    """Return when a metric of a node is at least so high.

    Cancellation: only this wait ends.
    """
    while True:
        if (await metrics_of(node)).get(metric, 0.0) >= least:
            return
        await trio.sleep(LOOK_SECONDS)


async def rows_of(node: LocalNode, page: str) -> Rows:
    """Return what a node shows on a page of its view.

    Cancellation: nothing is left over.
    """
    rows: Rows = json.loads(await page_of(node, f"/{page}"))[page]
    return rows
