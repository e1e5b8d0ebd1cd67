"""`asyncfabric serve directory`: who is in the cluster. No model, no fabric, no torch in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette

from asyncfabric._control import serve_directory
from asyncfabric_services.health.endpoints import node_routes
from asyncfabric_services.health.metrics import gauge
from asyncfabric_services.nodes.stage import Announce, Stage, open_control, serve_process
from asyncfabric_services.settings.schema import Settings


@asynccontextmanager
async def open_service(stage: Stage) -> AsyncIterator[Starlette]:
    """Hold the directory open.

    Cancellation: the nodes keep their views.
    """
    async with open_control(stage) as link, serve_directory(link) as directory:
        gauge(stage.registry, "directory", "nodes", "Nodes that are in.").set_function(
            lambda: len(directory.table.nodes)
        )
        yield Starlette(routes=node_routes(stage.condition, stage.registry))


async def serve(settings: Settings, announce: Announce) -> None:
    """Serve until SIGTERM; see serve_process.

    Cancellation: as there.
    """
    await serve_process(settings, "directory", open_service, announce)
