"""A backend in one process: the router's requests go straight to a batcher. Useful by itself, and to compare with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch
import trio
from prometheus_client import CollectorRegistry

from asyncfabric_services.router.backend import Capacity, GenerateRequest, ServedModel
from asyncfabric_services.router.server import StartError
from asyncfabric_services.runner.batcher import Batcher
from asyncfabric_services.runner.meter import RunnerMeter
from asyncfabric_services.runner.model import LoadedModel
from asyncfabric_services.runner.page_supply import FreeList
from asyncfabric_services.runner.runner import Runner
from asyncfabric_services.runner.scheduler import ScheduledRequest, Scheduler


@dataclass(frozen=True, slots=True)
class LocalLimits:
    """How much one process takes on.

    Attributes:
        pages: pages of the pool.
        chunk_tokens: prompt tokens of one pass.
        most_running: requests computed together.
        most_waiting: requests that wait for pages.
    """

    pages: int
    chunk_tokens: int = 256
    most_running: int = 32
    most_waiting: int = 256


class LocalBackend:
    """Prefill and decode of one model in this process; made by `open_local_backend`."""

    def __init__(self, loaded: LoadedModel, limits: LocalLimits, registry: CollectorRegistry) -> None:
        shape = loaded.shape
        memory = torch.zeros(shape.pool_bytes(limits.pages), dtype=torch.uint8)
        self.supply = FreeList(limits.pages)
        self.scheduler = Scheduler(
            self.supply,
            page_tokens=shape.page_tokens,
            chunk_tokens=limits.chunk_tokens,
            most_running=limits.most_running,
            most_waiting=limits.most_waiting,
        )
        runner = Runner(loaded, shape.view(memory, limits.pages))
        self.batcher = Batcher(runner, self.scheduler, RunnerMeter(registry, self.scheduler, self.supply))
        self._end_tokens = loaded.end_tokens
        self._most_running = limits.most_running
        most_tokens = min(loaded.max_tokens, limits.pages * shape.page_tokens)
        self._card = ServedModel(loaded.name, loaded.tokenizer, most_tokens)

    def models(self) -> Sequence[ServedModel]:
        """Return the one model."""
        return [self._card]

    def capacity(self) -> Capacity:
        """Return how busy it is."""
        return Capacity(self.scheduler.running, self.scheduler.waiting, self._most_running)

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[AsyncIterator[int]]:
        """Generate the answer within the scope; errors and cancellation are those of `Batcher.generate`."""
        member = ScheduledRequest(list(request.prompt), request.max_tokens, request.sampling, self._end_tokens)
        async with self.batcher.generate(member) as tokens:
            yield tokens


@asynccontextmanager
async def open_local_backend(
    loaded: LoadedModel, limits: LocalLimits, registry: CollectorRegistry
) -> AsyncIterator[LocalBackend]:
    """Run a backend within the scope; raises StartError for a model that the runner does not compute.

    Cancellation: waits for the pass in progress; requests that are left get ClosedError.
    """
    try:
        backend = await trio.to_thread.run_sync(LocalBackend, loaded, limits, registry)
    except ValueError as error:
        raise StartError(f"the model cannot be run: {error}") from error
    async with trio.open_nursery() as nursery:
        nursery.start_soon(backend.batcher.run)
        yield backend
        nursery.cancel_scope.cancel()
