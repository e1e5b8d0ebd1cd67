"""Nodes as actors of Ray: one placement group for the cluster, one named, detached actor for each node.

On trio's event loop; Ray's calls block, so they run in threads. Actors are found by their names, so any process that
reaches the Ray cluster can hold the launcher, and the cluster outlives all of them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
import msgspec
import ray
import trio
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncfabric.errors import BrokenError
from asyncfabric_services.exits import EnvironmentUnfit
from asyncfabric_services.launch.cluster import stop_all
from asyncfabric_services.launch.launcher import LaunchedNode
from asyncfabric_services.launch.plan import DIRECTORY, NodePlan, plan_nodes
from asyncfabric_services.launch.ray.addresses import ClusterAddresses
from asyncfabric_services.launch.ray.node_actor import NodeActor
from asyncfabric_services.launch.record import ClusterRecord, make_folder
from asyncfabric_services.launch.spec import ClusterSpec, Resources

OUTLIVES = True
LOOK_SECONDS = 2.0
PATIENCE_SECONDS = 10.0
REACH_SECONDS = 5.0
LEAST_CPUS = 0.001  # a bundle of nothing is refused
_T = TypeVar("_T")


class RayOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The section `[launcher.ray]`.

    Attributes:
        address: of the Ray cluster; "auto": the one of this host, or of RAY_ADDRESS.
        strategy: how the placement group spreads nodes over hosts.
        runtime_env: of the actors, as Ray has it.
    """

    address: str = "auto"
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    runtime_env: dict[str, Any] = {}


class RayLauncher:
    """The nodes of one cluster on Ray; made by `open_launcher` and `attach_launcher`."""

    def __init__(self, spec: ClusterSpec, key: str, bundles: list[str]) -> None:
        self._spec = spec
        self._options = spec.launcher_section("ray", RayOptions)
        self._key = key
        self._bundles = bundles
        self._addresses = ClusterAddresses(spec.name)

    @property
    def facts(self) -> Mapping[str, str]:
        """Where the Ray cluster is, and which nodes have a bundle in the placement group."""
        return {"address": ray.get_runtime_context().gcs_address, "bundles": ",".join(self._bundles)}

    async def start(self, plan: NodePlan) -> LaunchedNode:
        """Start a node and return it when it listens; see Launcher.

        One that has no bundle in the placement group is placed by what it needs alone.

        Cancellation: the node is ended with the cluster.
        """
        group = await _in_thread(lambda: ray.util.get_placement_group(namespace_of(self._spec.name)))
        needs = _needs(plan.resources)
        options: dict[str, Any] = {
            "name": plan.name,
            "lifetime": "detached",
            "max_restarts": -1,
            "max_task_retries": -1,
            "max_concurrency": 8,
            "num_cpus": needs.pop("CPU"),
            "num_gpus": needs.pop("GPU", 0),
            "memory": needs.pop("memory", None),
            "resources": needs,
            "runtime_env": self._options.runtime_env or None,
        }
        if plan.name in self._bundles:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=self._bundles.index(plan.name)
            )
        actor = ray.remote(NodeActor).options(**options).remote(self._spec.name, plan, self._key)
        node: LaunchedNode = await _in_thread(lambda: ray.get(actor.started.remote()))
        if node.state == "failed":
            await _in_thread(lambda: ray.kill(actor))
            raise BrokenError(f"node {plan.name} did not start: {node.reason}")
        return node

    async def stop(self, name: str) -> None:
        """Have a node drain and end for good; see Launcher.

        Cancellation: the node goes on ending.
        """
        try:
            actor = await _in_thread(lambda: ray.get_actor(name))
        except ValueError:
            raise KeyError(name) from None
        await _in_thread(lambda: _stop(actor))
        for place in (f"{DIRECTORY}/{name}", f"restarts/{name}"):  # a later node of this name begins anew
            await _in_thread(partial(self._addresses.forget, place))

    async def nodes(self) -> list[LaunchedNode]:
        """Return the nodes that were started and not stopped; see Launcher.

        Cancellation: nothing is left over.
        """
        return await _in_thread(self._look)

    async def aclose(self) -> None:
        """End the cluster: its nodes, in order, and its placement group; see Launcher.

        Cancellation: shielded and bounded.
        """
        with trio.CancelScope(shield=True):
            await stop_all(self)
            await _in_thread(self._remove_group)
            self._addresses.clear()

    def _look(self) -> list[LaunchedNode]:
        names = ray.util.list_named_actors()
        found = {}
        asked = {ray.get_actor(name).report.remote(): name for name in names}
        ready = ray.wait(list(asked), num_returns=len(asked), timeout=LOOK_SECONDS)[0] if asked else []
        for answer in ready:
            try:
                found[asked[answer]] = ray.get(answer)
            except RayError:
                continue  # it died after it was asked, and comes back
        return [found.get(name) or self._away(name) for name in sorted(names)]

    def _away(self, name: str) -> LaunchedNode:
        group = name.rpartition("-")[0]
        restarts = int(self._addresses.get(f"restarts/{name}") or 1) - 1
        reason = "its actor does not answer: Ray is starting it, or waits for a host for it; see `ray status`"
        return LaunchedNode(name, group, self._spec.role_of(group), "restarting", restarts=restarts, reason=reason)

    def _remove_group(self) -> None:
        try:
            ray.util.remove_placement_group(ray.util.get_placement_group(namespace_of(self._spec.name)))
        except ValueError:
            return  # it is gone already


def namespace_of(cluster: str) -> str:
    """Return the namespace of a cluster's actors, which is the name of its placement group too."""
    return f"asyncfabric-{cluster}"


@asynccontextmanager
async def open_launcher(spec: ClusterSpec, folder: Path) -> AsyncIterator[RayLauncher]:
    """Reserve what the nodes of a new cluster need; see LauncherModule.

    Raises EnvironmentUnfit where no Ray is reached, or a cluster of this name is on it.

    Cancellation: what was reserved is given back.
    """
    key = (await trio.to_thread.run_sync(make_folder, folder)).read_text(encoding="ascii")
    plans = plan_nodes(spec)
    async with _connected(spec.name, spec.launcher_section("ray", RayOptions).address):
        if await _in_thread(ray.util.list_named_actors):
            raise EnvironmentUnfit(f"a cluster {spec.name} runs on this Ray: end it with `asyncfabric down`")
        launcher = RayLauncher(spec, key, [plan.name for plan in plans])
        try:
            await _reserve(launcher, plans)
        except BaseException:
            await launcher.aclose()
            raise
        yield launcher


@asynccontextmanager
async def attach_launcher(record: ClusterRecord, folder: Path) -> AsyncIterator[RayLauncher]:
    """Open the launcher of a cluster that runs; see LauncherModule. Raises EnvironmentUnfit when it is gone.

    Cancellation: nothing is left over.
    """
    key = (await trio.to_thread.run_sync(make_folder, folder)).read_text(encoding="ascii")
    async with _connected(record.spec.name, record.facts["address"]):
        if not await _in_thread(ray.util.list_named_actors):
            raise EnvironmentUnfit(f"no node of {record.spec.name} is on the Ray at {record.facts['address']}")
        yield RayLauncher(record.spec, key, record.facts["bundles"].split(","))


@asynccontextmanager
async def _connected(cluster: str, address: str) -> AsyncIterator[None]:
    options = {"namespace": namespace_of(cluster), "log_to_driver": False, "logging_level": "ERROR"}
    where = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    try:
        await trio.to_thread.run_sync(_reach, where)
        # In a thread: in the main one Ray would take SIGTERM for itself.
        await trio.to_thread.run_sync(lambda: ray.init(address=address, **options))
    except (OSError, RayError, RuntimeError) as error:
        raise EnvironmentUnfit(f"no Ray is reached at {where}: {error}; start one: ray start --head") from None
    try:
        yield
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(ray.shutdown)


def _reach(address: str) -> None:
    """Raise OSError where nobody listens at HOST:PORT; Ray itself would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), REACH_SECONDS).close()


async def _reserve(launcher: RayLauncher, plans: tuple[NodePlan, ...]) -> None:
    name = namespace_of(launcher._spec.name)
    bundles = [_needs(plan.resources) for plan in plans]
    group = ray.util.placement_group(bundles, launcher._options.strategy, name=name, lifetime="detached")
    while not await _in_thread(lambda: group.wait(PATIENCE_SECONDS)):
        click.echo(f"waiting for a place for {len(plans)} nodes: see `ray status`", err=True)


def _needs(resources: Resources) -> dict[str, float]:
    """Return what a node needs in the terms of Ray."""
    needs: dict[str, float] = {"CPU": resources.cpus or LEAST_CPUS, **resources.rdma}
    if resources.gpus:
        needs["GPU"] = resources.gpus
    if resources.memory_bytes:
        needs["memory"] = resources.memory_bytes
    return needs


def _stop(actor: Any) -> None:
    try:
        ray.get(actor.stop.remote())
    finally:
        ray.kill(actor)


async def _in_thread(call: Callable[[], _T]) -> _T:
    """Run a blocking call of Ray; cancelled, the wait ends and the thread follows when Ray answers."""
    return await trio.to_thread.run_sync(call, abandon_on_cancel=True)
