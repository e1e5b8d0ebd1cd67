"""A backend over the decode and prefill nodes of a cluster: has them chosen, asks, and asks others when nodes fail.

Runs on the event loop, without torch. An answer goes on where a lost node left it: the next one gets the prompt and the
tokens that came already, and gives the same answer as the lost one would have.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import msgspec
import trio
from prometheus_client import CollectorRegistry

from asyncfabric.actors import (
    ActorDied,
    Identity,
    Member,
    Membership,
    Node,
    Reference,
    RemoteError,
    beside,
    trace_context,
)
from asyncfabric.control import DirectoryClient, Link
from asyncfabric.errors import BrokenError, BusyError, PeerError
from asyncfabric.kv import KvLayout
from asyncfabric.observe.spans import SpanRing
from asyncfabric.unreadable import UNREADABLE
from asyncfabric_services.health.metrics import BoundedCounter, gauge
from asyncfabric_services.nodes.messages import (
    DECODER,
    ENGINE_LABEL,
    FIELDS_LABEL,
    LAYOUT_LABEL,
    Generate,
    PrefillSource,
)
from asyncfabric_services.router.asked import Asked
from asyncfabric_services.router.attempts import AnswerTokens, Attempt, Attempts
from asyncfabric_services.router.backend import Capacity, GenerateRequest, ServedModel
from asyncfabric_services.router.fault import ApiFault
from asyncfabric_services.router.routing import Routing
from asyncfabric_services.runner.prefix import PromptBlocks

MOST_ATTEMPTS = 8
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0  # before another attempt: the view may lag behind a death
MOST_SOURCES = 3  # prefill nodes that a decode node may ask in one attempt

_log = logging.getLogger(__name__)


class ClusterBackend:
    """Generates tokens on the nodes that `membership` shows.

    `answers` is the actor behind `attempts`; `patience` is how many seconds a request waits for a node to take it;
    `by_prefix` lets a request go where the beginning of its prompt was computed.
    """

    def __init__(
        self,
        card: ServedModel,
        node: Node,
        link: Link,
        directory: DirectoryClient,
        membership: Membership,
        attempts: Attempts,
        answers: Reference,
        *,
        most_running: int,
        patience: float,
        registry: CollectorRegistry,
        spans: SpanRing | None = None,
        by_prefix: bool = True,
    ) -> None:
        self._card = card
        self._node = node
        self._link = link
        self._directory = directory
        self._membership = membership
        self._attempts = attempts
        self._answers = answers
        self._most_running = most_running
        self._patience = patience
        self._spans = spans or SpanRing()
        self._decodes = Routing(membership.load_of, by_prefix=by_prefix)
        self._prefills = Routing(membership.load_of, by_prefix=by_prefix)
        self._asked: dict[Asked, None] = {}  # in the order in which they came
        for role in ("prefill", "decode"):
            ready = gauge(registry, f"router_{role}", "nodes", f"Ready {role} nodes, as this router sees it.")
            ready.set_function(partial(self._count, role))
        self._retries = BoundedCounter(
            registry, "router", "retries_total", "Attempts after the first.", because=("lost", "busy", "failed")
        )

    def models(self) -> Sequence[ServedModel]:
        """Return the one model of the cluster; it passes fields while a ready decode node takes them."""
        takers, ready = self._takers_of_fields(), self._membership.members("decode")
        return [replace(self._card, passes_fields=any(member.identity in takers for member in ready))]

    def capacity(self) -> Capacity:
        """Return how busy it is, as far as this router's requests go."""
        return Capacity(len(self._asked), 0, self._most_running)

    def asked(self) -> Sequence[Asked]:
        """Return the requests inside, the oldest first."""
        return list(self._asked)

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[AsyncIterator[int]]:
        """Generate the answer within the scope; errors are those of Backend, and ApiFault 503 when no node is there.

        Cancellation: the decode node drops the request and gives its pages back before the scope is left, and so does
        the prefill node; a node that does not answer is waited for 10 s.
        """
        answer = AnswerTokens()
        asked = Asked(request, answer)
        self._asked[asked] = None
        try:
            async with beside() as tasks:
                tasks.start_soon(self._answer, asked)
                yield answer
        finally:
            del self._asked[asked]

    async def _answer(self, asked: Asked) -> None:
        answer = asked.answer
        try:
            await self._attempt_until_answered(asked)
            answer.end()
        except Exception as error:  # the reader of the tokens raises it, and the router sends it to the client
            answer.end(error)

    async def _attempt_until_answered(self, asked: Asked) -> None:
        request, answer = asked.request, asked.answer
        deadline = trio.current_time() + request.deadline_seconds
        lost = set[Identity]()  # asked again when nobody else is there: who was cut off comes back as the same node
        avoided, disliked = set[Identity](), set[Identity]()  # cannot take it; failed once, so others come first
        failure: Exception = BrokenError("nothing was tried")
        blocks = PromptBlocks(request.prompt)
        for attempts in range(MOST_ATTEMPTS):
            if len(answer.tokens) == request.max_tokens:
                return  # the node was lost between its last token and its goodbye
            asked.decode = ""
            decode = await self._chosen_decode(request, blocks, lost, avoided, disliked)
            self._decodes.chosen(decode, blocks, self._labels("decode"))
            sources = await self._sources(self._engine_of(decode), blocks)
            self._prefills.chosen(sources[0][0], blocks, self._labels("prefill"))
            asked.decode, asked.attempts = decode.identity.name, attempts + 1
            asked.sources = tuple(source.identity.name for source, _ in sources)
            try:
                await self._attempt(request, answer, decode, sources, deadline)
                return
            except (ActorDied, PeerError) as error:
                failure, because = BrokenError(f"decode node {decode.identity.name} was lost: {error}"), "lost"
                lost.add(decode.identity)
            except RemoteError as error:
                failure, because = _failure(error), "failed"
                disliked.add(decode.identity)
                if isinstance(failure, ValueError):
                    raise failure from error
                if isinstance(failure, BusyError):
                    because = "busy"
                    avoided.add(decode.identity)
                    if not self._able(request, lost | avoided):
                        raise failure from error
            self._retries.add(because=because)
            await trio.sleep(min(FIRST_PAUSE_S * 2**attempts, LONGEST_PAUSE_S))
            _log.warning(
                "request is tried again",
                extra={"fields": {"request": request.id, "tokens": len(answer.tokens), "because": str(failure)}},
            )
        raise failure

    async def _attempt(
        self,
        request: GenerateRequest,
        answer: AnswerTokens,
        decode: Member,
        sources: list[tuple[Member, KvLayout | None]],
        deadline: float,
    ) -> None:
        """Ask one decode node for the rest of the answer."""
        try:
            there = await self._link.connect(decode.address)
        except ValueError as error:  # the node's fault: as a ValueError it would be reported to the client as its own
            raise PeerError(f"{decode.identity.name} has no address that can be read: {error}") from None
        if there != decode.identity:
            raise PeerError(f"{decode.identity.name} has another incarnation by now")
        answered = list(answer.tokens)
        missing = request.max_tokens - len(answered)
        with (
            self._membership.assigned(decode.identity),
            self._attempts.attempt(request.id, answer, missing, self._card.tokenizer.vocabulary) as attempt,
            self._spans.open("attempt", trace_context.get() or "", decode=decode.identity.name) as span,
        ):
            message = Generate(
                attempt=attempt.key,
                prompt=[*request.prompt, *answered],
                max_tokens=missing,
                answered=len(answered),
                sampling=request.sampling,
                remaining_s=max(0.0, deadline - trio.current_time()),
                sources=[_source(member, layout) for member, layout in sources],
                reply=self._answers,
                trace=span.context,
                fields=msgspec.json.encode(request.fields) if request.fields else b"",
            )
            with attempt.asking:
                async with beside() as tasks:
                    tasks.start_soon(self._count_prefill, sources[0][0], attempt)
                    # Named: which life of its decoder answers is the same to a request that begins.
                    count = await self._node.ask(Reference(decode.identity, DECODER, 0), message)
                    await attempt.complete(count)
            attempt.check()

    async def _count_prefill(self, source: Member, attempt: Attempt) -> None:
        """Count the work of a prefill node until the first token."""
        with self._membership.assigned(source.identity):
            await attempt.first.wait()

    def _count(self, role: str) -> int:
        return len(self._membership.members(role))

    def _takers_of_fields(self) -> set[Identity]:
        return {node.identity for node in self._directory.nodes("decode") if FIELDS_LABEL in node.labels}

    def _able(self, request: GenerateRequest, avoided: set[Identity]) -> list[Member]:
        """Return the ready decode nodes that are not avoided and take the request's fields, by load."""
        free = [member for member in self._membership.by_load("decode") if member.identity not in avoided]
        if request.fields:
            takers = self._takers_of_fields()
            free = [member for member in free if member.identity in takers]
        return free

    async def _chosen_decode(
        self,
        request: GenerateRequest,
        blocks: PromptBlocks,
        lost: set[Identity],
        avoided: set[Identity],
        disliked: set[Identity],
    ) -> Member:
        """Return the first able node in the routing's order that is not avoided; waits for one, then ApiFault 503.

        One that is lost is the last choice, and has a moment to leave the view: it may be dead.
        """
        if lost:
            with trio.move_on_after(LONGEST_PAUSE_S):
                return await self._first_able(request, blocks, lost | avoided | disliked, lost | avoided)
        with trio.move_on_after(self._patience):
            return await self._first_able(request, blocks, avoided | disliked, avoided)
        raise _nobody("decode")

    async def _first_able(self, request: GenerateRequest, blocks: PromptBlocks, *refusals: set[Identity]) -> Member:
        """Wait for an able decode node that the first of these sets does not hold, or else the next set."""
        async for _ in self._membership.views():
            for refused in refusals:
                if free := self._able(request, refused):
                    return self._decodes.ordered(free, blocks, self._labels("decode"))[0]
        raise AssertionError("views do not end")

    def _labels(self, role: str) -> dict[Identity, Mapping[str, str]]:
        """Return labels as the directory's own view has them, which may be ahead of the membership."""
        return {node.identity: node.labels for node in self._directory.nodes(role)}

    def _engine_of(self, decode: Member) -> str:
        return self._labels("decode").get(decode.identity, {}).get(ENGINE_LABEL, "")

    async def _sources(self, engine: str, blocks: PromptBlocks) -> list[tuple[Member, KvLayout | None]]:
        """Return prefill nodes of an engine with their layouts, in the routing's order.

        Waits for one, then raises ApiFault 503.
        """
        views = self._membership.views()
        with trio.move_on_after(self._patience):
            async for _ in views:
                if found := self._readable_sources(engine, blocks):
                    return found
        raise _nobody("prefill")

    def _readable_sources(self, engine: str, blocks: PromptBlocks) -> list[tuple[Member, KvLayout | None]]:
        labels = self._labels("prefill")
        none: Mapping[str, str] = {}
        ours = [
            member
            for member in self._membership.by_load("prefill")
            if labels.get(member.identity, none).get(ENGINE_LABEL, "") == engine
        ]
        found: list[tuple[Member, KvLayout | None]] = []
        for member in self._prefills.ordered(ours, blocks, labels):
            its = labels.get(member.identity, none)  # a node that the directory lost already has none here
            try:
                layout = None if engine else msgspec.json.decode(its.get(LAYOUT_LABEL, ""), type=KvLayout)
            except UNREADABLE as error:
                _log.warning("the layout of prefill node %s cannot be read: %s", member.identity.name, error)
                continue
            found.append((member, layout))
            if len(found) == MOST_SOURCES:
                break
        return found


def _nobody(role: str) -> ApiFault:
    return ApiFault(
        503, f"no {role} node can take the request now", kind="server_error", code="no_nodes", retry_after=1
    )


def _source(member: Member, layout: KvLayout | None) -> PrefillSource:
    return PrefillSource(member.identity.name, member.fabric_address, layout, member.address)


def _failure(error: RemoteError) -> Exception:
    """Return what a decode node raised as the error that the router answers with."""
    if error.kind == "BusyError":
        return BusyError(str(error), remedy="try again in a moment")
    if error.kind == "ApiFault":  # the node drains, or takes no more
        return BusyError(f"{error.actor} takes no new requests: {error}")
    if error.kind == "ValueError":
        return ValueError(str(error))
    return BrokenError(f"the answer could not be computed: {error}")
