"""`asyncfabric serve decode`: generates answers from prompts that prefill nodes compute. Wiring, for every engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from starlette.applications import Starlette

from asyncfabric.actors import Membership, open_node
from asyncfabric_services.health.endpoints import node_routes
from asyncfabric_services.nodes.answering import Answering, DecoderActor
from asyncfabric_services.nodes.engine import Cluster
from asyncfabric_services.nodes.engine_choice import open_decode_engine
from asyncfabric_services.nodes.members import follow
from asyncfabric_services.nodes.messages import DECODER
from asyncfabric_services.nodes.names import NodeNames
from asyncfabric_services.nodes.secret import open_member_link
from asyncfabric_services.nodes.stage import Announce, Stage, open_directory, serve_process
from asyncfabric_services.settings.schema import Settings
from asyncfabric_services.trace.recorder import Recorder


@asynccontextmanager
async def open_service(stage: Stage) -> AsyncIterator[Starlette]:
    """Hold the node open.

    Cancellation: requests end, their sources are notified, the pass in progress is waited for.
    """
    async with (
        open_member_link(stage) as link,
        open_decode_engine(stage) as engine,  # ends after the actors: requests that end still reach their sources
        open_node(stage.condition.name, link) as node,
    ):
        membership, names = Membership(), NodeNames()
        answering = Answering(engine, Cluster(node, link, membership), stage.admission, stage.spans)
        await node.spawn(DecoderActor, answering, name=DECODER)
        async with open_directory(stage, link, engine.labels) as directory, trio.open_nursery() as watching:
            watching.start_soon(follow, directory, membership.apply, names.take)
            recorder = Recorder(stage.condition.name, stage.spans, engine.fabric)
            routes = node_routes(stage.condition, stage.registry, engine.view(link, names))
            yield Starlette(routes=[*routes, *recorder.routes()])
            watching.cancel_scope.cancel()


async def serve(settings: Settings, announce: Announce) -> None:
    """Serve until SIGTERM; see serve_process.

    Cancellation: as there.
    """
    await serve_process(settings, "decode", open_service, announce)
