"""`asyncfabric serve expert`: a node that holds a part of the experts of a model. Wiring only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import torch
import trio
from starlette.applications import Starlette

from asyncfabric.actors import labels_of, open_node
from asyncfabric.observe.metrics import FabricCollector
from asyncfabric_services.experts.expert import Expert, ExpertActor
from asyncfabric_services.experts.messages import EXPERT
from asyncfabric_services.experts.sparse_model import load_sparse
from asyncfabric_services.health.endpoints import node_routes
from asyncfabric_services.health.view import View
from asyncfabric_services.nodes.link_rows import link_rows
from asyncfabric_services.nodes.members import follow
from asyncfabric_services.nodes.names import NodeNames
from asyncfabric_services.nodes.rails import open_rails
from asyncfabric_services.nodes.secret import open_member_link
from asyncfabric_services.nodes.sight import fabric_peers, fabric_regions, named_waits
from asyncfabric_services.nodes.stage import Announce, Stage, open_directory, serve_process
from asyncfabric_services.router.server import StartError
from asyncfabric_services.settings.schema import ModelSection, Settings
from asyncfabric_services.trace.recorder import Recorder


@asynccontextmanager
async def open_service(stage: Stage) -> AsyncIterator[Starlette]:
    """Hold the node open.

    Cancellation: the step under way ends at its next half, the exchange is closed; the others miss this rank.
    """
    settings = stage.settings
    torch.set_num_threads(settings.model.threads)
    model = await trio.to_thread.run_sync(_loaded, settings.model)
    async with (
        open_member_link(stage) as link,
        open_rails(settings, stage.secret) as fabric,
        AsyncExitStack() as stack,
    ):
        FabricCollector(fabric, stage.registry)
        expert = Expert(model, fabric, stage.admission, stack, settings.batch.chunk_tokens, stage.registry)
        async with (
            open_node(stage.condition.name, link) as node,
            trio.open_nursery() as nursery,
        ):
            await node.spawn(ExpertActor, expert, name=EXPERT)
            async with open_directory(stage, link, labels_of(bytes(fabric.address))) as directory:
                names = NodeNames()
                nursery.start_soon(follow, directory, names.take)
                view = View(
                    waits=lambda: named_waits(fabric.why(), names),
                    peers=lambda: fabric_peers(fabric, names) + link_rows(link),
                    regions=lambda: fabric_regions(fabric, {}),
                )
                recorder = Recorder(stage.condition.name, stage.spans, fabric)
                routes = node_routes(stage.condition, stage.registry, view)
                yield Starlette(routes=[*routes, *recorder.routes()])
            nursery.cancel_scope.cancel()


def _loaded(section: ModelSection) -> Any:
    try:
        return load_sparse(section)
    except (OSError, ValueError) as error:  # what transformers raises for a folder that is no checkpoint
        raise StartError(f"the model cannot be loaded: {error}") from error


async def serve(settings: Settings, announce: Announce) -> None:
    """Serve until SIGTERM; see serve_process.

    Cancellation: as there.
    """
    await serve_process(settings, EXPERT, open_service, announce)
