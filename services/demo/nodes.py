"""Nodes of a demo: the local launcher without restarts, since the scenario decides, and what a node answers over HTTP.

Runs on the event loop. Files go to a folder that is removed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from asyncfabric_services.launch.local import LocalLauncher, RestartLimit, open_processes, short_folder
from asyncfabric_services.launch.local_node import LocalNode
from asyncfabric_services.launch.plan import NodePlan
from asyncfabric_services.look.asking import exchange

PATIENCE_S = 60.0


@asynccontextmanager
async def open_nodes(settings: Mapping[str, str]) -> AsyncIterator[LocalLauncher]:
    """Launch nodes within the scope, with these settings (environment variables); at its end all are ended.

    Cancellation: shielded while they end, each bounded by its drain.
    """
    with TemporaryDirectory(prefix="asyncfabric-", dir=short_folder()) as folder:
        place = Path(folder)
        async with open_processes(place, place / "ipc", RestartLimit(restarts=0), settings) as launcher:
            yield launcher


def plan_of(name: str, variables: Mapping[str, str] | None = None) -> NodePlan:
    """Return the plan of `prefill-1`, a prefill node, with environment variables of its own."""
    role = name.partition("-")[0]
    return NodePlan(name, role, role, dict(variables or {}))


async def page_of(node: LocalNode, path: str) -> str:
    """Return what a node answers over HTTP; raises NoAnswer when it does not.

    Cancellation: nothing is left over.
    """
    return (await exchange(node.http, path, PATIENCE_S)).body


async def metrics_of(node: LocalNode) -> dict[str, float]:
    """Return the metrics of a node by name, labels included; raises NoAnswer.

    Cancellation: nothing is left over.
    """
    body = await page_of(node, "/metrics")
    rows = (line.rpartition(" ") for line in body.splitlines() if line.startswith("asyncfabric_"))
    return {name: float(value) for name, _, value in rows}
