"""What prefill and decode nodes with vLLM in them have alike: the engine from settings, its death, what it shows."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import trio

from asyncfabric import Fabric
from asyncfabric.actors import labels_of
from asyncfabric.control import Link
from asyncfabric.integrations.rails_variable import SECRET_VARIABLE
from asyncfabric_services.exits import EnvironmentUnfit
from asyncfabric_services.health.view import View
from asyncfabric_services.nodes.link_rows import link_rows
from asyncfabric_services.nodes.messages import ENGINE_LABEL, FIELDS_LABEL, PREFIX_LABEL
from asyncfabric_services.nodes.names import NodeNames
from asyncfabric_services.nodes.stage import Stage
from asyncfabric_services.nodes.vllm.arguments import engine_arguments
from asyncfabric_services.nodes.vllm.host import EngineHost, open_host
from asyncfabric_services.nodes.vllm.sight import Transfers, VllmMetrics, Waits
from asyncfabric_services.router.server import StartError

_log = logging.getLogger(__name__)


class VllmNode:
    """The engine in a node, and what the node shows of it."""

    def __init__(self, host: EngineHost, transfers: Transfers) -> None:
        self.host = host
        self.transfers = transfers
        self.waits = Waits()
        labels = labels_of() | {ENGINE_LABEL: "vllm", FIELDS_LABEL: "any"}
        cache = host.engine.vllm_config.cache_config
        if cache.enable_prefix_caching:
            labels[PREFIX_LABEL] = str(cache.block_size)
        self.labels: Mapping[str, str] = labels
        self.fabric: Fabric | None = None  # each worker of vLLM has one, in its process

    def view(self, link: Link, names: NodeNames) -> View:
        """Return what the node shows of itself: vLLM's workers have fabrics of their own, in their processes."""
        return View(self.waits.lines, lambda: link_rows(link))


def sampling_params(arguments: dict[str, Any]) -> Any:
    """Return vLLM's SamplingParams, outputs as they come; raises ValueError for values that vLLM refuses."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    given = dict(arguments)
    try:
        if "structured_outputs" in given:
            given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
        return SamplingParams(**given, output_kind=RequestOutputKind.DELTA)
    except TypeError as error:
        raise ValueError(f"vLLM refuses the request: {error}") from error


@contextmanager
def secret_for_workers(secret: bytes | None) -> Iterator[None]:
    """Let the processes that are started within the scope open fabrics with this secret; None: they are open.

    It is in memory of this process alone, which its user's processes reach by a path: no file is left, however it ends.
    """
    if secret is None:
        yield
        return
    handle = os.memfd_create("asyncfabric-secret")
    before = os.environ.get(SECRET_VARIABLE)
    try:
        os.write(handle, secret)
        os.environ[SECRET_VARIABLE] = f"/proc/{os.getpid()}/fd/{handle}"
        yield
    finally:
        os.environ.pop(SECRET_VARIABLE)
        if before is not None:
            os.environ[SECRET_VARIABLE] = before
        os.close(handle)


@asynccontextmanager
async def open_vllm(stage: Stage) -> AsyncIterator[VllmNode]:
    """Start vLLM as the settings ask. When its process ends, the node fails, drains and ends with a status.

    Raises StartError when vLLM does not start, EnvironmentUnfit when it is not installed.

    Cancellation: the engine's process has ended.
    """
    arguments = await trio.to_thread.run_sync(
        engine_arguments, stage.settings, stage.condition.role, stage.condition.name
    )

    def make() -> Any:
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(arguments)

    with secret_for_workers(stage.secret):
        async with _opened(stage, make) as node:
            yield node


@asynccontextmanager
async def _opened(stage: Stage, make: Callable[[], Any]) -> AsyncIterator[VllmNode]:
    transfers, opened = Transfers(stage.spans), open_host(make)
    try:
        host = await opened.__aenter__()
    except (EnvironmentUnfit, StartError):
        raise
    except Exception as error:
        raise StartError(f"vLLM did not start: {error}") from error
    try:
        from asyncfabric.integrations.vllm.statistics import watch_transfers

        stage.registry.register(VllmMetrics(lambda: int(host.engine.vllm_config.cache_config.num_gpu_blocks or 0)))
        with watch_transfers(transfers.report):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_end_failed, stage, host)
                yield VllmNode(host, transfers)
                nursery.cancel_scope.cancel()
    finally:
        await opened.__aexit__(None, None, None)


async def _end_failed(stage: Stage, host: EngineHost) -> None:
    await host.failed.wait()
    stage.condition.fail(f"vLLM's engine is dead: {host.reason}")
    _log.error("%s", stage.condition.reason)
    stage.stop.set()
