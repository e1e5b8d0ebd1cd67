"""The connections of an HTTP server: accepted in one loop, each served by hypercorn, each failing alone.

Runs on the event loop. hypercorn's own `serve` ends the whole server when one connection raises, and strangers can make
it raise: a WebSocket handshake with bytes after it is enough. So the loop is ours, and hypercorn serves connections.
Knows no path and no request; what is answered comes from the ASGI application.
"""

from __future__ import annotations

import logging
import math
import resource
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import h11
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import wrap_app
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asyncfabric_services.router.bodies import dropping, fault_of_head
from asyncfabric_services.router.fault import ApiFault

VERSIONS = ("1.0", "1.1")
PLENTY = 16384  # descriptors that a process asks for; a rail does the same
LINGER_SECONDS = 2.0
CONTINUE = b"HTTP/1.1 100 "
MOST_AHEAD = 16  # pieces of at most MAX_RECV bytes that came while a request is answered

_log = logging.getLogger(__name__)


async def serve_connections(
    app: ASGIApp,
    config: Config,
    listener: trio.SocketListener | trio.SSLListener[trio.SocketStream],
    close: trio.Event,
) -> None:
    """Serve all who connect to `listener` until `close` is set, then wait `config.graceful_timeout` for the last.

    Connections have half of the descriptors of this process. One more ends the one that has been without a request for
    longest, so that silence keeps nobody else out; it is closed itself where all have one.

    Cancellation: closes listener and connections at once.
    """
    context = WorkerContext(None)
    most, inside, closed = _descriptors() // 2, 0, 0
    idle: dict[_Connection, None] = {}  # in the order in which they became so

    async def serve_one(stream: trio.SocketStream | trio.SSLStream[trio.SocketStream]) -> None:
        nonlocal inside, closed
        if inside >= most:
            closed += 1
            if closed & (closed - 1) == 0:  # the 1st, 2nd, 4th, 8th: a flood fills no disk
                _log.warning("%d connections are open, which is the most: %d were closed for others", inside, closed)
            if not idle:
                await stream.aclose()
                return
            longest = next(iter(idle))
            del idle[longest]
            longest.scope.cancel()
        inside += 1
        connection = _Connection(app, config, context, stream, idle)
        try:
            with connection.scope:
                await connection.run()
        except* Exception as failures:
            reasons = "; ".join(repr(failure) for failure in _leaves(failures))
            _log.warning("a connection was dropped: %s", reasons, exc_info=_log.isEnabledFor(logging.DEBUG))
        finally:
            inside -= 1
            idle.pop(connection, None)

    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as accepting:
            accepting.start_soon(partial(trio.serve_listeners, serve_one, [listener], handler_nursery=connections))
            await close.wait()
            accepting.cancel_scope.cancel()
        await context.terminated.set()  # idle connections end, others with their answer
        connections.cancel_scope.deadline = trio.current_time() + config.graceful_timeout


def _descriptors() -> int:
    """Raise how many descriptors this process may have to PLENTY, or as far as it may; return how many that are.

    ZeroMQ ends the process that has none left when a node connects.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = PLENTY if hard == resource.RLIM_INFINITY else min(hard, PLENTY)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed if soft == resource.RLIM_INFINITY else max(soft, allowed)


class _Connection(TCPServer):
    """A connection that is also read while a request of it is answered.

    hypercorn leaves what comes after a request unread until that is answered, be it one more line end, and so does not
    notice that the client has gone. And it asks a client that waits for `100 Continue` for its body before the
    application has seen the request; here that leaves when the application first asks for the body, and not at all
    when it answers without.

    Attributes:
        scope: of the whole connection.
    """

    _reading: trio.CancelScope | None = None
    _dropping = False
    _continue: RawData | None = None

    def __init__(
        self,
        app: ASGIApp,
        config: Config,
        context: WorkerContext,
        stream: trio.SocketStream | trio.SSLStream[trio.SocketStream],
        idle: dict[_Connection, None],
    ) -> None:
        self.scope = trio.CancelScope()
        self._idle = idle
        idle[self] = None
        served = wrap_app(partial(_guarded, app, self._ask_for_body), config.wsgi_max_body_size, "asgi")
        super().__init__(served, config, context, ConnectionState({}), stream)  # type: ignore[arg-type]

    async def _ask_for_body(self) -> None:
        held, self._continue = self._continue, None
        if held is not None:
            await super().protocol_send(held)

    async def _read_data(self) -> None:
        put, pieces = trio.open_memory_channel[bytes](MOST_AHEAD)

        async def handle() -> None:
            async for piece in pieces:
                await self.protocol.handle(RawData(piece))
                if self.scope.deadline == math.inf and isinstance(self.protocol.protocol, H2Protocol):
                    # HTTP/2 is answered by a refusal alone, and hypercorn calls such a connection busy for ever.
                    self.scope.deadline = trio.current_time() + LINGER_SECONDS

        async with trio.open_nursery() as nursery, put:
            nursery.start_soon(handle)
            try:
                with trio.CancelScope() as self._reading:
                    while piece := await self.stream.receive_some(MAX_RECV):
                        if not self._dropping:
                            await put.send(bytes(piece))
            except (trio.ClosedResourceError, trio.BrokenResourceError):
                pass  # it ended, on whichever side
            self._reading = None
            nursery.cancel_scope.cancel()
        await self.protocol.handle(Closed())  # after the last piece: a request that began later would not receive it
        await self.idle_task.stop()  # or its descriptor would stay until it had been idle long enough

    async def protocol_send(self, event: Event) -> None:
        """Send; bytes that are no request end a connection after the answer that is being sent, not in its middle."""
        if isinstance(event, Updated):
            self._idle.pop(self, None)
            if event.idle:
                self._idle[self] = None
        if isinstance(event, RawData):
            before_answer = self._h11("our_state") is h11.SEND_RESPONSE
            self._continue = event if before_answer and event.data.startswith(CONTINUE) else None
            if self._continue is not None:
                return
        if (
            isinstance(event, Closed)
            and self._protocol("stream") is not None
            and self._h11("our_state") is h11.SEND_BODY
        ):
            self._dropping = True
        else:
            await super().protocol_send(event)

    async def _close(self) -> None:
        """Close; in the middle of a request send the end, and drop what comes for LINGER_SECONDS or until its end.

        A connection that is closed with bytes unread is reset, and its client may lose the answer (RFC 9112, 9.6).
        """
        if self._reading is None or self._h11("their_state") not in (h11.SEND_BODY, h11.ERROR):
            await super()._close()
        elif self._reading.deadline == math.inf:
            self._dropping = True
            self._reading.deadline = trio.current_time() + LINGER_SECONDS
            with suppress(AttributeError, trio.BrokenResourceError, trio.BusyResourceError, trio.ClosedResourceError):
                await self.stream.send_eof()

    def _protocol(self, name: str) -> Any:
        return getattr(self.protocol.protocol, name, None)  # None for HTTP/2, and so below for a WebSocket

    def _h11(self, name: str) -> Any:
        return getattr(self._protocol("connection"), name, None)


async def _guarded(
    app: ASGIApp, ask_for_body: Callable[[], Awaitable[None]], scope: Scope, receive: Receive, send: Send
) -> None:
    """Refuse what is not HTTP/1: the kernel does not see that a stream of HTTP/2 takes no bytes, and ends none.

    Refuses also what `fault_of_head` does. A body that is left unread holds nobody.
    """
    if scope["type"] != "http":
        await app(scope, receive, send)
        return
    if scope["http_version"] not in VERSIONS:
        other = ApiFault(505, "this server speaks HTTP/1.1 only", code="http_version_not_supported")
        await JSONResponse(other.plain(), other.status)(scope, receive, send)
        return
    send = dropping(receive, send)
    fault = fault_of_head(scope)
    if fault is not None:
        await JSONResponse(fault.plain(), fault.status, {"connection": "close"})(scope, receive, send)
        return

    async def receive_asked() -> Message:
        await ask_for_body()
        return await receive()

    await app(scope, receive_asked, send)


def _leaves(failures: ExceptionGroup[Exception]) -> list[Exception]:
    found = list[Exception]()
    for failure in failures.exceptions:
        found += _leaves(failure) if isinstance(failure, ExceptionGroup) else [failure]
    return found
