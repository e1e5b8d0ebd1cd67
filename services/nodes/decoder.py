"""Answers requests on a decode node: leases pages, has them filled by a prefill node, decodes in the running batch.

Runs on the event loop. A request that ends, however, has given its pages back or left them in quarantine.
"""

from __future__ import annotations

import logging
from typing import ClassVar

import torch
import trio

from asyncfabric import BrokenError, BusyError, ClosedError, PeerError, StaleKeyError, TransferError
from asyncfabric.actors import Actor, Membership, handles
from asyncfabric.kv import KvInbox, KvLease
from asyncfabric.observe.spans import SpanRing, Value
from asyncfabric_services.nodes.filling import fill
from asyncfabric_services.nodes.messages import Generate, Source, Tokens, refuse_fields
from asyncfabric_services.nodes.paged_model import PagedModel
from asyncfabric_services.router.admission import RequestAdmission
from asyncfabric_services.runner.batcher import Batcher
from asyncfabric_services.runner.scheduler import Member

_log = logging.getLogger(__name__)


class Decoder:
    """The requests of one decode node."""

    def __init__(
        self,
        model: PagedModel,
        inbox: KvInbox,
        batcher: Batcher,
        admission: RequestAdmission,
        spans: SpanRing,
        membership: Membership,
        most_waiting: int,
    ) -> None:
        self._model = model
        self._inbox = inbox
        self._batcher = batcher
        self._admission = admission
        self._spans = spans
        self._membership = membership
        self._most_waiting = most_waiting
        self._waiting = 0

    async def generate(self, request: Generate) -> int:
        """Answer a request; returns how many tokens were told.

        Raises BusyError when too many wait for pages, ValueError for what the pool can never hold, BrokenError when
        no source could fill the pages, TimeoutError, and ClosedError when the node stops.

        Cancellation: the source is told to stop and confirms, or is fenced off; the request leaves the batch.
        """
        refuse_fields(request)
        deadline = trio.current_time() + request.remaining_s
        with (
            trio.move_on_at(deadline) as in_time,
            self._admission.admit() as place,
            self._spans.open("answer", request.trace, request=request.attempt, prompt=len(request.prompt)) as span,
            place.scope,
        ):
            lease, logits = await self._received(request, deadline, span.context)
            async with lease:
                with self._spans.open("decode", span.context, request=request.attempt) as decoding:
                    told = await self._decode(request, lease, logits)
                    decoding.note(tokens=told)
                    return told
        if in_time.cancelled_caught:
            raise TimeoutError(f"the deadline of the request passed on {self._model.pool!r}")
        raise ClosedError("the decode node was stopped before the answer was complete", remedy="ask another node")

    async def _received(self, request: Generate, deadline: float, context: str) -> tuple[KvLease, torch.Tensor]:
        """Return a lease that holds the prompt, and the logits of the next token; asks one source after the other."""
        sources, failures = list(request.sources), list[str]()
        while sources:
            difference = sources[0].layout.difference(self._model.pool.layout)
            if difference is not None:  # the node's fault, not the request's
                failures.append(f"{sources[0].name}: the layouts differ in {difference}")
                _log.warning("request %s passes over a source: %s", request.attempt, failures[-1])
                del sources[0]
                continue
            with self._spans.open("wait for pages", context, request=request.attempt):
                lease = await self._leased(request, deadline)
            try:
                return lease, await self._filled(lease, sources[0], request, context)
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

    async def _filled(self, lease: KvLease, source: Source, request: Generate, context: str) -> torch.Tensor:
        about: dict[str, Value] = {"request": request.attempt, "source": source.name, "lease": lease.number}
        with self._spans.open("fill prompt", context, **about) as span:
            logits = await fill(
                self._inbox, lease, source, request.prompt, trace=span.context, membership=self._membership
            )
            span.note(pieces=lease.expected, imms=", ".join(map(str, lease.imms)))
        return logits

    async def _decode(self, request: Generate, lease: KvLease, logits: torch.Tensor) -> int:
        table = lease.pages.tolist()
        prompt, ends = request.prompt, self._model.loaded.end_tokens
        member = Member(list(prompt), request.max_tokens, request.sampling, ends, table=table, computed=len(prompt))
        member.chooser.skip(request.answered)
        first = member.take(logits)
        if first is None:
            return 0
        await request.reply.tell(Tokens(request.attempt, [first]))
        told = 1
        if not member.finished:
            async with self._batcher.generate(member) as answer:
                async for token in answer:
                    await request.reply.tell(Tokens(request.attempt, [token]))
                    told += 1
        return told


class DecoderActor(Actor):
    """Where routers ask a decode node."""

    mailbox_capacity: ClassVar[int] = 1024
    concurrency: ClassVar[int] = 4096  # how many run and wait is bounded by the decoder

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    @handles(Generate)
    async def generate(self, message: Generate) -> int:
        """Answer a request; see Decoder.generate."""
        return await self._decoder.generate(message)
