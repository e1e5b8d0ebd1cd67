"""What one does with a cluster, over any launcher: bring it up, wait until it answers, scale it, look, take it down.

Runs on the event loop; starts no process itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import trio

from asyncfabric_services.launch.launcher import LaunchedNode, Launcher
from asyncfabric_services.launch.plan import NodePlan, plan_nodes, scale_changes, stop_order
from asyncfabric_services.launch.record import ClusterRecord
from asyncfabric_services.launch.spec import ClusterSpec
from asyncfabric_services.look.asking import NoAnswer, ask

LOOK_SECONDS = 0.1
PATIENCE_SECONDS = 2.0  # for one question over HTTP


async def bring_up(launcher: Launcher, spec: ClusterSpec) -> LaunchedNode:
    """Start the directory, then all other nodes side by side; return the directory when all listen.

    Raises:
        BrokenError: perhaps in groups: a node did not start.

    Cancellation: what was started goes on until the launcher is closed.
    """
    first, *others = plan_nodes(spec)
    directory = await launcher.start(first)
    await start_all(launcher, others, directory.link)
    return directory


async def start_all(launcher: Launcher, plans: Iterable[NodePlan], directory: str) -> None:
    """Start nodes side by side that join the directory at this link address; raises and cancellation: as bring_up.

    Cancellation: as there.
    """
    async with trio.open_nursery() as nursery:
        for plan in plans:
            nursery.start_soon(launcher.start, plan.joined(directory))


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
    """Start and stop nodes until each group has its count; return the record of the cluster as it is then.

    New nodes listen when it returns, and stopped ones have ended.

    Raises:
        SettingsError: a group is not there, or its count is none that can be; nothing was changed.
        BrokenError, LaunchRefused, RemoteError: a node did not start, or the launcher does not do it.

    Cancellation: nodes go on starting and ending.
    """
    spec = record.spec
    for group, count in counts.items():
        spec = spec.scaled(group, count)
    running = await launcher.nodes()
    async with trio.open_nursery() as nursery:
        for group in counts:
            starting, ending = scale_changes([node.name for node in running if node.group == group], spec, group)
            nursery.start_soon(start_all, launcher, starting, record.directory.link)
            for name in ending:
                nursery.start_soon(launcher.stop, name)
    return msgspec.structs.replace(record, spec=spec)


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

    A process that the directory knows only in an earlier life is "waiting".

    Cancellation: nothing is left over.
    """
    nodes = await launcher.nodes()
    directory = next((node.http for node in nodes if node.role == "directory" and node.http), "")
    known: dict[str, dict[str, Any]] = {}
    try:
        answer = await ask(directory, "/nodes", PATIENCE_SECONDS) if directory else {"nodes": []}
        known = {row["name"]: row for row in answer["nodes"]}
    except NoAnswer:
        pass  # nodes are shown all the same
    rows = []
    for node in nodes:
        there = known.get(node.name, {})
        state = node.state if node.state != "running" else "waiting"
        if state == "waiting" and there.get("link") == node.link:
            state = there["state"]
        row = {"name": node.name, "role": node.role, "state": state, "http": node.http, "link": node.link}
        rows.append(row | {"restarts": node.restarts, "reason": node.reason})
    return rows
