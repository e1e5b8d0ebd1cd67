"""The endpoint that generates: one ASGI call is one request, one nursery, one backend scope. Runs on the event loop.

Three tasks: one watches for the client's end and cancels the others, one takes tokens from the backend, one sends.
Taking and sending are apart because a server's send cannot be cancelled: a client that stops reading must not
hold pages, so tokens are taken (at most `max_tokens` small pieces of text) whether it reads or not.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from functools import partial

import trio
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from asyncfabric.actors import trace_context
from asyncfabric.observe.spans import OpenSpan, SpanRing
from asyncfabric_services.router.admission import AdmittedPlace, RequestAdmission
from asyncfabric_services.router.ask import Ask, Limits, read_ask
from asyncfabric_services.router.backend import Backend
from asyncfabric_services.router.bodies import SHORT_BODY_BYTES, BodyRoom
from asyncfabric_services.router.fault import ApiFault, deadline_passed, drained, fault_of
from asyncfabric_services.router.form import DONE, Form, event, fault_event
from asyncfabric_services.router.incoming import (
    ClientGone,
    read_body,
    read_deadline,
    read_trace,
    unless_gone,
    wait_gone,
)
from asyncfabric_services.router.meter import RouterMeter
from asyncfabric_services.router.spoken import Spoken

CLIENT_GONE = 499  # nobody reads it; it is what proxies write into logs and metrics
MIDDLE_BODY_BYTES = 256 << 10
EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class GenerationOutcome:
    """How one generation ended: with a reason to finish, or with a fault; and what was sent to the client."""

    spoken: Spoken
    finish: str = ""
    fault: ApiFault | None = None
    status: int = CLIENT_GONE


class Generation:
    """`/v1/completions`, or `/v1/chat/completions` when `chat` is set, as an ASGI application."""

    def __init__(
        self,
        backend: Backend,
        admission: RequestAdmission,
        room: BodyRoom,
        limits: Limits,
        meter: RouterMeter,
        spans: SpanRing,
        *,
        chat: bool,
    ) -> None:
        self._backend = backend
        self._admission = admission
        self._room = room
        self._limits = limits
        self._meter = meter
        self._spans = spans
        self._chat = chat
        self._endpoint = "chat" if chat else "completions"
        self._middle, self._long = trio.CapacityLimiter(1), trio.CapacityLimiter(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Cancellation: cancels the generation and waits until the backend has let go of it.
        """
        started = trio.current_time()
        status = CLIENT_GONE
        try:
            self._admission.check()  # before a long body is read
            deadline = read_deadline(scope, self._limits.deadline_seconds)
            with self._room.body() as held:
                ask = await self._read(await read_body(receive, deadline, held), deadline, receive)
            with (
                self._admission.join(ask.priority) as place,
                self._spans.open_request("request", read_trace(scope), request=ask.request.id) as span,
            ):
                if not place.turn.is_set():
                    await self._wait_turn(ask, place, started + deadline, span, receive)
                trace_context.set(span.context)  # for this call of the application, which is a task of its own
                send = with_trace(send, span)
                status = await self._answer(ask, place, started + deadline, span, receive, send)
        except ApiFault as fault:
            status = fault.status
            await self._refuse(fault, scope, receive, send)
        except ClientGone:
            pass
        finally:
            self._meter.answered(self._endpoint, status, trio.current_time() - started)

    async def _read(self, body: bytes, deadline: float, receive: Receive) -> Ask:
        """Read a body: a short one here, in some 20 ms, others on a thread, so that answers and heartbeats go on.

        Bodies up to MIDDLE_BODY_BYTES have a thread of their own: they take parts of a second, longer ones seconds. One
        whose client leaves does not wait for the thread any more.
        """
        read = partial(
            read_ask,
            body,
            chat=self._chat,
            cards=self._backend.models(),
            limits=self._limits,
            deadline_seconds=deadline,
        )
        if len(body) <= SHORT_BODY_BYTES:
            return read()
        limiter = self._middle if len(body) <= MIDDLE_BODY_BYTES else self._long
        return await unless_gone(receive, partial(trio.to_thread.run_sync, read, limiter=limiter))

    async def _wait_turn(
        self, ask: Ask, place: AdmittedPlace, deadline: float, span: OpenSpan, receive: Receive
    ) -> None:
        began = trio.current_time()
        try:
            with trio.move_on_at(deadline) as in_time, self._spans.open("wait for a turn", span.context):
                await unless_gone(receive, partial(self._admission.wait_turn, place))
        finally:
            self._meter.waited(ask.priority, trio.current_time() - began)
        if in_time.cancelled_caught:
            raise deadline_passed(ask.request.deadline_seconds, 0)

    async def _refuse(self, fault: ApiFault, scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse(fault.plain(), fault.status, fault.headers())(scope, receive, send)

    async def _answer(
        self, ask: Ask, place: AdmittedPlace, deadline: float, span: OpenSpan, receive: Receive, send: Send
    ) -> int:
        outcome, watching = GenerationOutcome(Spoken(ask.card.tokenizer, ask.stops)), trio.CancelScope()

        async def send_on(message: Message) -> None:
            # With its last byte the server calls the client gone, and only then closes or recycles the connection:
            # who still watched would cancel that, and a client that waits for the end would wait for ever.
            if message["type"] == "http.response.body" and not message["more_body"]:
                watching.cancel()
            await send(message)

        put, pieces = trio.open_memory_channel[str](math.inf)
        place.scope.deadline = deadline
        async with pieces, trio.open_nursery() as nursery:  # a last token may come while the others end
            nursery.start_soon(wait_gone, receive, watching, nursery.cancel_scope)
            nursery.start_soon(self._generate, ask, place, outcome, put)
            form = Form(ask, int(time.time()))
            await (self._send_pieces if ask.stream else self._send_whole)(form, outcome, pieces, send_on)
            nursery.cancel_scope.cancel()
        self._meter.generated(len(ask.request.prompt), outcome.spoken.tokens)
        prompt_tokens, tokens = len(ask.request.prompt), outcome.spoken.tokens
        span.note(status=outcome.status, prompt_tokens=prompt_tokens, tokens=tokens, finish=outcome.finish)
        _log.info(
            "request %s",
            "answered" if outcome.status == 200 else "not answered",
            extra={
                "fields": {
                    "request": ask.request.id,
                    "status": outcome.status,
                    "prompt_tokens": len(ask.request.prompt),
                    "answer_tokens": outcome.spoken.tokens,
                    "finish": outcome.finish,
                }
            },
        )
        return outcome.status

    async def _generate(
        self, ask: Ask, place: AdmittedPlace, outcome: GenerationOutcome, put: trio.MemorySendChannel[str]
    ) -> None:
        started = trio.current_time()
        spoken = outcome.spoken
        with put:
            try:
                with place.scope:
                    async with self._backend.generate(ask.request) as tokens:
                        async for token in tokens:
                            if spoken.tokens == 0:
                                self._meter.first_token(trio.current_time() - started)
                            put.send_nowait(spoken.feed(token))
                            if spoken.stopped:
                                break
                        full = spoken.tokens == ask.request.max_tokens
                        outcome.finish = "length" if full and not spoken.stopped else "stop"
                        put.send_nowait(spoken.finish())
            except Exception as error:
                outcome.fault = fault_of(error)
                if outcome.fault is None:
                    _log.exception("request %s failed", ask.request.id)
                    outcome.fault = ApiFault(500, "the server failed; its log states why", kind="server_error")
                if outcome.fault.status == 429:
                    outcome.fault.retry_after = self._admission.retry_seconds()
            if place.scope.cancelled_caught and not outcome.finish:
                late = deadline_passed(ask.request.deadline_seconds, spoken.tokens)
                outcome.fault = drained() if place.cut_off else late

    async def _send_whole(
        self, form: Form, outcome: GenerationOutcome, pieces: trio.MemoryReceiveChannel[str], send: Send
    ) -> None:
        text = "".join([piece async for piece in pieces])
        fault = outcome.fault
        if fault is not None:
            await _send_json(send, outcome, fault.status, fault.plain(), fault.headers())
        else:
            await _send_json(send, outcome, 200, form.whole(text, outcome.finish, outcome.spoken.tokens), {})

    async def _send_pieces(
        self, form: Form, outcome: GenerationOutcome, pieces: trio.MemoryReceiveChannel[str], send: Send
    ) -> None:
        try:
            text = await pieces.receive()  # before the status is sent: a refusal must still have its own
        except trio.EndOfChannel:
            await self._send_whole(form, outcome, pieces, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        await _send_body(send, event(form.piece(text, first=True)))
        async for piece in pieces:
            if piece:
                await _send_body(send, event(form.piece(piece)))
        fault = outcome.fault
        if fault is not None:
            outcome.status, ending = fault.status, fault_event(fault)
        else:
            outcome.status, ending = 200, event(form.piece("", outcome.finish))
            ending += event(form.usage(outcome.spoken.tokens)) if form.ask.usage_at_end else b""
            ending += DONE
        await _send_body(send, ending, more=False)


def with_trace(send: Send, span: OpenSpan) -> Send:
    """Return `send` with a header of the answer that names the span: traceresponse of W3C Trace Context, level 2."""
    if not span.recorded:
        return send
    value = span.context.partition(" ")[0].encode()

    async def send_on(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"traceresponse", value)]}
        await send(message)

    return send_on


async def _send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _send_json(
    send: Send, outcome: GenerationOutcome, status: int, plain: dict[str, object], headers: dict[str, str]
) -> None:
    answer = JSONResponse(plain, status, headers)
    await send({"type": "http.response.start", "status": status, "headers": answer.raw_headers})
    outcome.status = status
    await _send_body(send, bytes(answer.body), more=False)
