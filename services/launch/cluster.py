"""What one does with a cluster, over any launcher: bring it up, wait until it answers, scale it, look, take it down.

Runs on the event loop; starts no process itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import trio

from asyncfabric_services.launch.launcher import LaunchedNode, Launcher
from asyncfabric_services.launch.plan import DIRECTORY, NodePlan, plan_nodes, scale_changes, stop_order
from asyncfabric_services.launch.record import ClusterRecord, links_of
from asyncfabric_services.launch.spec import ClusterSpec
from asyncfabric_services.look.asking import NoAnswer, ask
from asyncfabric_services.settings.keys import SettingsError, nearest

LOOK_SECONDS = 0.1
PATIENCE_SECONDS = 2.0  # for one question over HTTP


async def bring_up(launcher: Launcher, spec: ClusterSpec) -> list[LaunchedNode]:
    """Start the directories, then all other nodes side by side; return the directories when all listen.

    Raises:
        BrokenError: perhaps in groups: a node did not start.

    Cancellation: what was started goes on until the launcher is closed.
    """
    directories, others = _split(plan_nodes(spec))
    there = await start_all(launcher, directories, "")
    await start_all(launcher, others, links_of(there))
    return there


async def start_all(launcher: Launcher, plans: Iterable[NodePlan], directories: str) -> list[LaunchedNode]:
    """Start nodes side by side that join the directories at these link addresses; return them in order of name.

    Raises as bring_up.

    Cancellation: as there.
    """
    started: dict[str, LaunchedNode] = {}

    async def start(plan: NodePlan) -> None:
        started[plan.name] = await launcher.start(plan.joined(directories))

    async with trio.open_nursery() as nursery:
        for plan in plans:
            nursery.start_soon(start, plan)
    return [started[name] for name in sorted(started)]


def _split(plans: Iterable[NodePlan]) -> tuple[list[NodePlan], list[NodePlan]]:
    """Return the plans of directories, and all others."""
    directories: list[NodePlan] = []
    others: list[NodePlan] = []
    for plan in plans:
        (directories if plan.role == DIRECTORY else others).append(plan)
    return directories, others


async def wait_ready(launcher: Launcher, names: Iterable[str]) -> list[dict[str, Any]]:
    """Wait until nodes of these names are ready in the directory; return the rows of all.

    Cancellation: only this wait ends.
    """
    wanted = set(names)
    while True:
        rows = await rows_of(launcher)
        if wanted <= {row["name"] for row in rows if row["state"] == "ready"}:
            return rows
        await trio.sleep(LOOK_SECONDS)


async def scale(launcher: Launcher, record: ClusterRecord, counts: Mapping[str, int]) -> ClusterRecord:
    """Start and stop nodes until so many of each group run; return the record of the cluster as it is then.

    New nodes listen when it returns, and stopped ones have ended. Nodes join the directories of this moment.

    Raises:
        SettingsError: a group is not there, or its count is none that can be; nothing was changed.
        BrokenError, LaunchRefused, RemoteError: a node did not start, or the launcher does not do it.

    Cancellation: nodes go on starting and ending.
    """
    spec = record.spec
    for group, count in counts.items():
        spec = spec.scaled(group, count)
    running = await launcher.nodes()
    starting: list[NodePlan] = []
    ending: list[str] = []
    for group in counts:
        more, less = scale_changes([node.name for node in running if node.group == group], spec, group)
        starting += more
        ending += less
    new, others = _split(starting)
    kept = [node for node in record.directories if node.name not in ending]
    directories = kept + await start_all(launcher, new, "")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(start_all, launcher, others, links_of(directories))
        for name in ending:
            nursery.start_soon(launcher.stop, name)
    return msgspec.structs.replace(record, spec=spec, directories=directories)


async def drain(launcher: Launcher, record: ClusterRecord, name: str) -> ClusterRecord:
    """Have a node finish what it has and end for good; return the record, whose group has what is left of it.

    Raises:
        SettingsError: there is no such node, or it is the only directory; nothing was changed.
        LaunchRefused: the launcher does not do it.

    Cancellation: the node goes on ending.
    """
    spec = record.spec
    running = {node.name: node for node in await launcher.nodes()}
    if name not in running:
        raise SettingsError(f"{spec.name} has no node {name!r}{nearest(name, list(running))}")
    group = running[name].group
    if running[name].role == DIRECTORY and len(record.directories) == 1:
        raise SettingsError(f"{name} is the only directory of {spec.name}; asyncfabric down ends the cluster")
    await launcher.stop(name)
    left = [node for node in await launcher.nodes() if node.group == group]
    directories = [node for node in record.directories if node.name != name]
    return msgspec.structs.replace(record, spec=spec.scaled(group, len(left)), directories=directories)


async def stop_all(launcher: Launcher) -> None:
    """Drain and end all nodes: those of a role side by side, routers first and the directory last.

    Cancellation: the nodes go on ending.
    """
    roles = {node.name: node.role for node in await launcher.nodes()}
    for role in dict.fromkeys(roles[name] for name in stop_order(roles)):
        async with trio.open_nursery() as nursery:
            for name in [name for name in roles if roles[name] == role]:
                nursery.start_soon(launcher.stop, name)


async def rows_of(launcher: Launcher) -> list[dict[str, Any]]:
    """Return a row for each node: the launcher's, and whether it is ready, draining or not in the directory.

    A process that directories know only in an earlier life is "waiting".

    Cancellation: nothing is left over.
    """
    nodes = await launcher.nodes()
    known = {(row["name"], row["link"]): row for row in await registered(nodes, PATIENCE_SECONDS)}
    rows = []
    for node in nodes:
        state = node.state if node.state != "running" else "waiting"
        if state == "waiting" and (node.name, node.link) in known:
            state = known[node.name, node.link]["state"]
        row = {"name": node.name, "role": node.role, "state": state, "http": node.http, "link": node.link}
        rows.append(row | {"restarts": node.restarts, "reason": node.reason})
    return rows


async def registered(nodes: Iterable[LaunchedNode], patience_s: float) -> list[dict[str, Any]]:
    """Return the rows of all directories among these nodes that answer.

    A directory knows itself, and all nodes that are none.

    Cancellation: nothing is left over.
    """
    rows: list[dict[str, Any]] = []

    async def look(directory: LaunchedNode) -> None:
        with suppress(NoAnswer):  # nodes are shown all the same
            rows.extend((await ask(directory.http, "/nodes", patience_s))["nodes"])

    async with trio.open_nursery() as nursery:
        for node in nodes:
            if node.role == DIRECTORY and node.http:
                nursery.start_soon(look, node)
    return rows
