"""`asyncfabric serve router`: the OpenAI API over the nodes of a cluster. Wiring only; no torch, no fabric."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from starlette.applications import Starlette

from asyncfabric.actors import Membership, open_node
from asyncfabric_services.health.view import Row, View
from asyncfabric_services.nodes.link_rows import link_rows
from asyncfabric_services.nodes.members import follow
from asyncfabric_services.nodes.stage import Announce, Stage, open_control, open_directory, serve_process
from asyncfabric_services.router.app import router_app
from asyncfabric_services.router.ask import Limits
from asyncfabric_services.router.attempts import ATTEMPTS, Attempts, AttemptsActor
from asyncfabric_services.router.backend import ServedModel
from asyncfabric_services.router.cluster_backend import ClusterBackend
from asyncfabric_services.router.server import StartError
from asyncfabric_services.router.shared_load import share_load
from asyncfabric_services.runner.checkpoint import checkpoint_folder
from asyncfabric_services.runner.supported import refuse_unsupported
from asyncfabric_services.runner.tokenizer import ByteTokenizer, CheckpointTokenizer
from asyncfabric_services.settings.schema import ModelSection, Settings
from asyncfabric_services.trace.recorder import Recorder

RANDOM_MODEL = "asyncfabric-random"


def card_of(section: ModelSection, engine: str = "reference") -> ServedModel:
    """Return the model that requests can ask for; blocking. Raises StartError where the nodes behind it would.

    Of a model for another engine than the reference runner only the vocabulary and the length are read.
    """
    if section.path is None:
        return ServedModel(section.name or RANDOM_MODEL, ByteTokenizer(), section.max_tokens)
    from transformers import AutoConfig, AutoTokenizer

    try:
        folder = checkpoint_folder(section.path)
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if engine == "reference":
            refuse_unsupported(config)
        tokenizer = CheckpointTokenizer(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    except (OSError, ValueError) as error:
        raise StartError(f"the model cannot be loaded: {error}") from error
    return ServedModel(section.name or section.path.name, tokenizer, config.max_position_embeddings)


@asynccontextmanager
async def open_service(stage: Stage) -> AsyncIterator[Starlette]:
    """Hold the router open.

    Cancellation: requests end, and are taken back from the nodes that work on them.
    """
    settings, attempts, membership = stage.settings, Attempts(), Membership()
    card = await trio.to_thread.run_sync(card_of, settings.model, settings.engine.kind)
    async with (
        open_control(stage) as link,
        open_node(stage.condition.name, link) as node,
        open_directory(stage, link, {}) as directory,
        trio.open_nursery() as nursery,
    ):
        answers = await node.spawn(AttemptsActor, attempts, name=ATTEMPTS)
        nursery.start_soon(follow, directory, membership.apply)
        nursery.start_soon(share_load, link, membership)
        backend = ClusterBackend(
            card,
            node,
            link,
            directory,
            membership,
            attempts,
            answers,
            most_running=settings.router.most_requests,
            patience=settings.cluster.patience,
            registry=stage.registry,
            spans=stage.spans,
            by_prefix=settings.router.routing == "prefix",
        )
        limits = Limits(settings.router.default_tokens, settings.router.deadline)
        view = View(
            waits=lambda: [asked.waiting() for asked in backend.asked()],
            peers=lambda: link_rows(link),
            more={
                "requests": lambda: [asked.row() for asked in backend.asked()],
                "members": lambda: member_rows(membership),
            },
        )
        app = router_app(backend, stage.admission, stage.condition, stage.registry, limits, view, stage.spans)
        app.router.routes.extend(Recorder(stage.condition.name, stage.spans).routes())
        yield app
        nursery.cancel_scope.cancel()


def member_rows(membership: Membership) -> list[Row]:
    """Return the nodes as this router sees them, by name."""
    return [
        {
            "name": member.identity.name,
            "role": member.role,
            "state": member.state,
            "load": member.load,
            "requests": membership.assigned_to(member.identity),
            "incarnation": f"{member.identity.incarnation:x}",
        }
        for member in membership.members(state=None)
    ]


async def serve(settings: Settings, announce: Announce) -> None:
    """Serve until SIGTERM; see serve_process.

    Cancellation: as there.
    """
    await serve_process(settings, "router", open_service, announce)
