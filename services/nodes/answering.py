"""Answers the requests of routers on a decode node, by whatever engine is in it. On the event loop.

Deadline, admission, spans and the way of tokens to the router are here; an engine generates.
"""

from __future__ import annotations

from typing import ClassVar

import trio

from asyncfabric import ClosedError
from asyncfabric.actors import Actor, handles
from asyncfabric.observe.spans import SpanRing
from asyncfabric_services.nodes.engine import Cluster, DecodeEngine
from asyncfabric_services.nodes.messages import Generate, Tokens
from asyncfabric_services.router.admission import RequestAdmission


class Answering:
    """The requests of one decode node."""

    def __init__(self, engine: DecodeEngine, cluster: Cluster, admission: RequestAdmission, spans: SpanRing) -> None:
        self._engine = engine
        self._cluster = cluster
        self._admission = admission
        self._spans = spans

    async def answer(self, request: Generate) -> int:
        """Answer a request; returns how many tokens were sent to its router.

        Raises what DecodeEngine.generate raises, TimeoutError, and ClosedError when the node stops.

        Cancellation: as DecodeEngine.generate.
        """
        deadline = trio.current_time() + request.remaining_s
        with (
            trio.move_on_at(deadline) as in_time,
            self._admission.admit() as place,
            self._spans.open("answer", request.trace, request=request.attempt, prompt=len(request.prompt)) as span,
            place.scope,
        ):
            sent = 0
            async with self._engine.generate(
                request, deadline=deadline, context=span.context, cluster=self._cluster
            ) as answer:
                async for tokens in answer:
                    await request.reply.tell(Tokens(request.attempt, tokens))
                    sent += len(tokens)
            return sent
        if in_time.cancelled_caught:
            raise TimeoutError("the deadline of the request passed on this decode node")
        raise ClosedError("the decode node was stopped before the answer was complete", remedy="ask another node")


class DecoderActor(Actor):
    """Where routers ask a decode node."""

    mailbox_capacity: ClassVar[int] = 1024
    concurrency: ClassVar[int] = 4096  # how many run and wait is bounded by the engine

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    @handles(Generate)
    async def generate(self, message: Generate) -> int:
        """Answer a request; see Answering.answer."""
        return await self._answering.answer(message)
