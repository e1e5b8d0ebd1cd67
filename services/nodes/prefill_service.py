"""`asyncfabric serve prefill`: computes prompts for decode nodes. Wiring, for every engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from starlette.applications import Starlette

from asyncfabric.actors import open_node
from asyncfabric_services.health.endpoints import node_routes
from asyncfabric_services.nodes.engine import PrefillEngine
from asyncfabric_services.nodes.engine_choice import open_prefill_engine
from asyncfabric_services.nodes.members import follow
from asyncfabric_services.nodes.names import NodeNames
from asyncfabric_services.nodes.secret import open_member_link
from asyncfabric_services.nodes.stage import Announce, Stage, open_directory, serve_process
from asyncfabric_services.settings.schema import Settings
from asyncfabric_services.trace.recorder import Recorder


@asynccontextmanager
async def open_service(stage: Stage) -> AsyncIterator[Starlette]:
    """Hold the node open.

    Cancellation: prompts in progress are cancelled and drain, their leaseholders are notified.
    """
    async with (
        open_member_link(stage) as link,
        open_prefill_engine(stage) as engine,  # ends after the actors: prompts that end still notify their leaseholders
        open_node(stage.condition.name, link) as node,
    ):
        await engine.join(node)
        async with open_directory(stage, link, engine.labels) as directory, trio.open_nursery() as watching:
            names = NodeNames()
            watching.start_soon(follow, directory, names.take)
            watching.start_soon(_drain, stage, engine)
            recorder = Recorder(stage.condition.name, stage.spans, engine.fabric)
            routes = node_routes(stage.condition, stage.registry, engine.view(link, names))
            yield Starlette(routes=[*routes, *recorder.routes()])
            watching.cancel_scope.cancel()


async def _drain(stage: Stage, engine: PrefillEngine) -> None:
    await stage.stop.wait()
    engine.drain()


async def serve(settings: Settings, announce: Announce) -> None:
    """Serve until SIGTERM; see serve_process.

    Cancellation: as there.
    """
    await serve_process(settings, "prefill", open_service, announce)
