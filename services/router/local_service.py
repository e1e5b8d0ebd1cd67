"""`asyncfabric serve local`: one process that is a whole OpenAI server. Wiring of settings, backend and HTTP."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
import trio
from prometheus_client import CollectorRegistry

from asyncfabric.observe.spans import SpanRing
from asyncfabric_services.health.condition import Condition, node_name
from asyncfabric_services.router.app import router_app
from asyncfabric_services.router.ask import Limits
from asyncfabric_services.router.doorway import doorway_of, queueing
from asyncfabric_services.router.local_backend import LocalLimits, open_local_backend
from asyncfabric_services.router.server import StartError, serve_until, set_on_signals
from asyncfabric_services.runner.model import LoadedModel, ModelChoice, load_model
from asyncfabric_services.settings.schema import ModelSection, Settings
from asyncfabric_services.telemetry.export import telemetry_of

_log = logging.getLogger(__name__)


def model_choice(section: ModelSection) -> ModelChoice:
    """Return the model that the settings name."""
    return ModelChoice(
        path=section.path,
        layers=section.layers,
        hidden=section.hidden,
        query_heads=section.query_heads,
        kv_heads=section.kv_heads,
        max_tokens=section.max_tokens,
        seed=section.seed,
    )


def load_named(settings: Settings) -> LoadedModel:
    """Load the model that the settings name; raises StartError when it cannot be loaded."""
    try:
        return load_model(
            model_choice(settings.model), page_tokens=settings.cache.page_tokens, name=settings.model.name or None
        )
    except (OSError, ValueError) as error:  # what transformers raises for a folder that is no checkpoint
        raise StartError(f"the model cannot be loaded: {error}") from error


def pages_of(settings: Settings, loaded: LoadedModel) -> int:
    """Return how many pages the memory of the settings holds; raises StartError for none."""
    pages = settings.cache.memory // loaded.shape.pool_bytes(1)
    if pages < 1:
        raise StartError(
            f"cache.memory is {settings.cache.memory} bytes, one page of all layers needs {loaded.shape.pool_bytes(1)}"
        )
    return pages


async def serve(settings: Settings, announce: Callable[[Mapping[str, str]], None]) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends it at once.

    Raises StartError, perhaps in groups, when the model cannot be loaded or has no page, or when it cannot listen.

    Cancellation: ends without a drain.
    """
    try:
        condition = Condition(node_name(settings.node.name), "local")
    except ValueError as error:
        raise StartError(f"node.name: {error}") from None
    telemetry = telemetry_of(condition.name, condition.role)
    registry, spans = CollectorRegistry(), SpanRing()
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(set_on_signals, stop, nursery.cancel_scope)
        torch.set_num_threads(settings.model.threads)
        loaded = await trio.to_thread.run_sync(load_named, settings)
        pages = pages_of(settings, loaded)
        batch = settings.batch
        limits = LocalLimits(pages, batch.chunk_tokens, batch.most_running, batch.most_waiting)
        async with (
            open_local_backend(loaded, limits, registry) as backend,
            telemetry.exporting(spans, registry),
        ):
            admission = queueing(condition, settings)
            app = router_app(
                backend,
                admission,
                condition,
                registry,
                Limits(settings.router.default_tokens, settings.router.deadline),
                spans=spans,
            )
            doorway = doorway_of(settings, api=True)
            _log.info("serving", extra={"fields": {"model": loaded.name, "pages": pages, "name": condition.name}})
            await serve_until(
                app, admission, condition, doorway, stop, lambda address: announce({"listening": address})
            )
        nursery.cancel_scope.cancel()
