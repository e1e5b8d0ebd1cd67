"""The reference runner as the engine of a decode node: leases pages, has them filled, decodes in the running batch.

Runs on the event loop. A request that ends, however, has given its pages back or left them in quarantine.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch
import trio

from asyncfabric import BrokenError, BusyError, Fabric, PeerError, StaleKeyError, TransferError
from asyncfabric.actors import Membership, labels_of
from asyncfabric.control import Link
from asyncfabric.kv import KvInbox, KvLease, deliver, open_inbox, open_kv_channel
from asyncfabric.observe.spans import SpanRing, Value
from asyncfabric_services.health.view import View
from asyncfabric_services.nodes.engine import Cluster
from asyncfabric_services.nodes.filling import fill
from asyncfabric_services.nodes.messages import Generate, PrefillSource, refuse_fields
from asyncfabric_services.nodes.names import NodeNames
from asyncfabric_services.nodes.paged_model import PagedModel, PoolSupply, open_paged_model
from asyncfabric_services.nodes.sight import FabricSight
from asyncfabric_services.nodes.stage import Stage
from asyncfabric_services.runner.batcher import Batcher
from asyncfabric_services.runner.meter import RunnerMeter
from asyncfabric_services.runner.scheduler import ScheduledRequest, Scheduler

_log = logging.getLogger(__name__)


class PagedDecode:
    """The requests of one decode node."""

    def __init__(self, model: PagedModel, inbox: KvInbox, batcher: Batcher, spans: SpanRing, most_waiting: int) -> None:
        self.labels = labels_of(bytes(model.fabric.address))
        self.fabric: Fabric | None = model.fabric
        self._model = model
        self._inbox = inbox
        self._batcher = batcher
        self._spans = spans
        self._most_waiting = most_waiting
        self._waiting = 0

    def view(self, link: Link, names: NodeNames) -> View:
        """Return what the node shows of itself."""
        return FabricSight(self._model, link, names, self._inbox).view()

    @asynccontextmanager
    async def generate(
        self, request: Generate, *, deadline: float, context: str, cluster: Cluster
    ) -> AsyncIterator[AsyncIterator[list[int]]]:
        """Generate an answer within the scope; see DecodeEngine.

        Raises BusyError when too many wait for pages, ValueError for what the pool can never hold.

        Cancellation: the source is ordered to stop and confirms, or is fenced off; the request leaves the batch.
        """
        refuse_fields(request)
        lease, logits = await self._received(request, deadline, context, cluster.membership)
        async with lease:
            table = lease.pages.tolist()
            prompt, ends = request.prompt, self._model.loaded.end_tokens
            member = ScheduledRequest(
                list(prompt), request.max_tokens, request.sampling, ends, table=table, computed=len(prompt)
            )
            member.chooser.skip(request.answered)
            first = member.take(logits)
            with self._spans.open("decode", context, request=request.attempt) as decoding:
                if first is None or member.finished:
                    yield _tokens(first, None)
                else:
                    async with self._batcher.generate(member) as answer:
                        yield _tokens(first, answer)
                decoding.note(tokens=len(member.tokens) - len(prompt))

    async def _received(
        self, request: Generate, deadline: float, context: str, membership: Membership
    ) -> tuple[KvLease, torch.Tensor]:
        """Return a lease that holds the prompt, and the logits of the next token; asks one source after the other."""
        sources, failures = list(request.sources), list[str]()
        while sources:
            layout = sources[0].layout
            difference = "their engines" if layout is None else layout.difference(self._model.pool.layout)
            if difference is not None:  # the node's fault, not the request's
                failures.append(f"{sources[0].name}: the layouts differ in {difference}")
                _log.warning("request %s passes over a source: %s", request.attempt, failures[-1])
                del sources[0]
                continue
            with self._spans.open("wait for pages", context, request=request.attempt):
                lease = await self._leased(request, deadline)
            try:
                return lease, await self._filled(lease, sources[0], request, context, membership)
            except StaleKeyError as error:
                lease.release()
                _log.info("request %s asks %s again: %s", request.attempt, sources[0].name, error)
            except (PeerError, TransferError) as error:
                lease.release()
                failures.append(f"{sources.pop(0).name}: {error}")
                _log.info("request %s leaves a source: %s", request.attempt, failures[-1])
            except BaseException:
                lease.release()
                raise
        raise BrokenError(
            f"no prefill node could compute the prompt: {'; '.join(failures) or 'none was named'}",
            remedy="see the logs of the prefill nodes",
        )

    async def _leased(self, request: Generate, deadline: float) -> KvLease:
        if self._waiting >= self._most_waiting:
            raise BusyError(f"{self._waiting} requests wait for pages here, which is the most", remedy="ask another")
        tokens = len(request.prompt) + request.max_tokens - 1  # the last token is never fed back
        self._waiting += 1
        try:
            return await self._model.pool.lease(request.attempt, tokens=tokens, context=True, deadline=deadline)
        finally:
            self._waiting -= 1

    async def _filled(
        self, lease: KvLease, source: PrefillSource, request: Generate, context: str, membership: Membership
    ) -> torch.Tensor:
        about: dict[str, Value] = {"request": request.attempt, "source": source.name, "lease": lease.number}
        with self._spans.open("fill prompt", context, **about) as span:
            logits = await fill(self._inbox, lease, source, request.prompt, trace=span.context, membership=membership)
            span.note(pieces=lease.expected, imms=", ".join(map(str, lease.imms)))
        return logits


async def _tokens(first: int | None, others: AsyncIterator[int] | None) -> AsyncIterator[list[int]]:
    if first is not None:
        yield [first]
    if others is not None:
        async for token in others:
            yield [token]


@asynccontextmanager
async def open_paged_decode(stage: Stage) -> AsyncIterator[PagedDecode]:
    """Open model, fabric, pool, batcher and inbox as the settings ask. Raises StartError.

    Cancellation: sources are notified, the pass in progress is waited for.
    """
    batch = stage.settings.batch
    async with (
        open_paged_model(stage) as model,
        open_kv_channel(model.fabric) as channel,
        trio.open_nursery() as nursery,
    ):
        supply = PoolSupply(model.pool)
        scheduler = Scheduler(
            supply,
            page_tokens=model.pool.layout.page_tokens,
            chunk_tokens=batch.chunk_tokens,
            most_running=batch.most_running,
            most_waiting=model.pool.pages,  # who has pages is never refused; who waits for them is counted before
        )
        batcher = Batcher(model.runner, scheduler, RunnerMeter(stage.registry, scheduler, supply))
        nursery.start_soon(batcher.run)
        async with open_inbox(model.fabric, model.pool, channel) as inbox:
            nursery.start_soon(deliver, channel, [inbox])
            yield PagedDecode(model, inbox, batcher, stage.spans, batch.most_waiting)
        nursery.cancel_scope.cancel()
