"""`asyncfabric serve prefill`: computes prompts and streams their keys and values to decode nodes. Wiring only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import trio
from starlette.applications import Starlette

from asyncfabric.actors import labels_of
from asyncfabric.kv import FabricMessenger, KvOutbox, deliver, open_outbox
from asyncfabric_services.health.endpoints import node_routes
from asyncfabric_services.nodes.members import follow
from asyncfabric_services.nodes.messages import LAYOUT_LABEL
from asyncfabric_services.nodes.names import NodeNames
from asyncfabric_services.nodes.paged_model import open_paged_model
from asyncfabric_services.nodes.prefiller import Prefiller, StreamMeter
from asyncfabric_services.nodes.sight import FabricSight
from asyncfabric_services.nodes.stage import Announce, Stage, open_control, open_directory, serve_process
from asyncfabric_services.settings.schema import Settings
from asyncfabric_services.trace.recorder import Recorder


@asynccontextmanager
async def open_service(stage: Stage) -> AsyncIterator[Starlette]:
    """Hold the node open.

    Cancellation: jobs are cancelled and drain, their leaseholders are told.
    """
    async with open_paged_model(stage) as model:
        meter = StreamMeter(stage.registry)
        prefiller = Prefiller(model, stage.admission, stage.spans, stage.settings.batch.chunk_tokens, meter)
        messenger = FabricMessenger(model.fabric)
        layout = msgspec.json.encode(model.pool.layout).decode()
        labels = labels_of(bytes(model.fabric.address)) | {LAYOUT_LABEL: layout}
        async with trio.open_nursery() as nursery:  # ends last: jobs that end still tell their leaseholders
            async with (
                open_control(stage) as link,
                open_outbox(model.fabric, model.pool, messenger, prefiller.serve) as outbox,
            ):
                nursery.start_soon(deliver, messenger, [outbox])
                nursery.start_soon(_drain, stage, outbox)
                async with open_directory(stage, link, labels) as directory:
                    names = NodeNames()
                    nursery.start_soon(follow, directory, names.take)
                    sight = FabricSight(model, link, names, outbox)
                    recorder = Recorder(stage.condition.name, stage.spans, model.fabric)
                    routes = node_routes(stage.condition, stage.registry, sight.view())
                    yield Starlette(routes=[*routes, *recorder.routes()])
            nursery.cancel_scope.cancel()


async def _drain(stage: Stage, outbox: KvOutbox) -> None:
    await stage.stop.wait()
    outbox.drain()


async def serve(settings: Settings, announce: Announce) -> None:
    """Serve until SIGTERM; see serve_process.

    Cancellation: as there.
    """
    await serve_process(settings, "prefill", open_service, announce)
