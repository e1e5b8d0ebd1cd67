"""`asyncfabric serve decode`: leases pages, has them filled by prefill nodes, decodes requests together. Wiring."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from starlette.applications import Starlette

from asyncfabric.actors import Membership, labels_of, open_node
from asyncfabric.kv import FabricMessenger, deliver, open_inbox
from asyncfabric_services.health.endpoints import node_routes
from asyncfabric_services.nodes.decoder import Decoder, DecoderActor
from asyncfabric_services.nodes.members import follow
from asyncfabric_services.nodes.messages import DECODER
from asyncfabric_services.nodes.names import NodeNames
from asyncfabric_services.nodes.paged_model import PoolSupply, open_paged_model
from asyncfabric_services.nodes.sight import FabricSight
from asyncfabric_services.nodes.stage import Announce, Stage, open_control, open_directory, serve_process
from asyncfabric_services.runner.batcher import Batcher
from asyncfabric_services.runner.meter import RunnerMeter
from asyncfabric_services.runner.scheduler import Scheduler
from asyncfabric_services.settings.schema import Settings
from asyncfabric_services.trace.recorder import Recorder


@asynccontextmanager
async def open_service(stage: Stage) -> AsyncIterator[Starlette]:
    """Hold the node open.

    Cancellation: requests end, their sources are told, the pass in progress is waited for.
    """
    batch = stage.settings.batch
    async with open_paged_model(stage) as model:
        supply = PoolSupply(model.pool)
        scheduler = Scheduler(
            supply,
            page_tokens=model.pool.layout.page_tokens,
            chunk_tokens=batch.chunk_tokens,
            most_running=batch.most_running,
            most_waiting=model.pool.pages,  # who has pages is never refused; who waits for them is counted before
        )
        batcher = Batcher(model.runner, scheduler, RunnerMeter(stage.registry, scheduler, supply))
        messenger = FabricMessenger(model.fabric)
        async with trio.open_nursery() as nursery:  # ends last: requests that end still hear their sources
            nursery.start_soon(batcher.run)
            async with (
                open_inbox(model.fabric, model.pool, messenger) as inbox,
                open_control(stage) as link,
                open_node(stage.condition.name, link) as node,
            ):
                nursery.start_soon(deliver, messenger, [inbox])
                membership = Membership()
                decoder = Decoder(model, inbox, batcher, stage.admission, stage.spans, membership, batch.most_waiting)
                await node.spawn(DecoderActor, decoder, name=DECODER)
                async with (
                    open_directory(stage, link, labels_of(bytes(model.fabric.address))) as directory,
                    trio.open_nursery() as watching,
                ):
                    names = NodeNames()
                    watching.start_soon(follow, directory, membership.apply, names.take)
                    sight = FabricSight(model, link, names, inbox)
                    recorder = Recorder(stage.condition.name, stage.spans, model.fabric)
                    routes = node_routes(stage.condition, stage.registry, sight.view())
                    yield Starlette(routes=[*routes, *recorder.routes()])
                    watching.cancel_scope.cancel()
            nursery.cancel_scope.cancel()


async def serve(settings: Settings, announce: Announce) -> None:
    """Serve until SIGTERM; see serve_process.

    Cancellation: as there.
    """
    await serve_process(settings, "decode", open_service, announce)
