"""The HTTP server of a node: its connections, SIGTERM, and the drain between the two.

Drain: new requests are answered 503 while the listener stays open, so that clients and load balancers read a
reason and not a refused connection; running ones go on; what is left near the deadline is cut off with an error; then
the listener closes and the server ends.
"""

from __future__ import annotations

import logging
import signal
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import trio
from hypercorn.config import Config
from starlette.applications import Starlette

from asyncfabric_services.health.condition import Condition
from asyncfabric_services.router.admission import RequestAdmission
from asyncfabric_services.router.connections import serve_connections
from asyncfabric_services.router.gate import HttpGate

FINISH_SHARE = 0.8  # of the drain deadline is for answers, the rest for goodbyes
BACKLOG = 1024
KEPT_SECONDS = 75.0
"""A connection without a request is kept for so long where there is room: longer than clients keep theirs (httpx 5 s,
load balancers 60 s), since a request that meets the end of its connection is lost."""

_log = logging.getLogger(__name__)


class StartError(Exception):
    """A node cannot start with its settings; the text is for people."""


@dataclass(frozen=True, slots=True)
class Doorway:
    """Where and how to listen.

    Attributes:
        host: address to listen on.
        port: port to listen on, 0 for a free one.
        drain_seconds: from the wish to stop until the server has ended.
        stall_seconds: a client that takes no bytes for this long is disconnected.
        names: further names of this server, see HttpGate.
        keys: of the API, see HttpGate.
        certificate: chain of certificates in PEM; with it the server speaks TLS only.
        key: the private key of the first of them, without a passphrase.
    """

    host: str = "127.0.0.1"
    port: int = 0
    drain_seconds: float = 30.0
    stall_seconds: float = 30.0
    names: tuple[str, ...] = ()
    keys: tuple[str, ...] = field(default=(), repr=False)
    certificate: Path | None = None
    key: Path | None = None


async def serve_until(
    app: Starlette,
    admission: RequestAdmission,
    condition: Condition,
    doorway: Doorway,
    stop: trio.Event,
    on_listening: Callable[[str], None],
) -> None:
    """Serve `app` until `stop` is set, then drain; returns when nothing is left.

    `on_listening` gets the address, for example `http://127.0.0.1:8000`. Raises StartError when it cannot listen.

    Cancellation: closes all connections at once, without a drain.
    """
    tls = _tls(doorway)
    try:
        plain, address = _listen(doorway)
    except OSError as error:
        raise StartError(f"cannot listen on {doorway.host} port {doorway.port}: {error.strerror}") from error
    listener: trio.SocketListener | trio.SSLListener[trio.SocketStream] = plain
    if tls is not None:
        listener = trio.SSLListener(plain, tls, https_compatible=True)
        address = address.replace("http://", "https://", 1)
    gate = HttpGate(app, (*doorway.names, doorway.host), doorway.keys)
    config = Config()
    config.ssl_handshake_timeout = doorway.stall_seconds
    config.keep_alive_timeout = KEPT_SECONDS
    config.graceful_timeout = doorway.drain_seconds * (1 - FINISH_SHARE) / 2
    config.accesslog = None
    config.errorlog = logging.getLogger("asyncfabric_services.http")
    config.include_server_header = False
    close = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_connections, gate, config, listener, close)
        condition.state = "ready"
        on_listening(address)
        await stop.wait()
        condition.drain("the node is to stop")
        _log.info("draining", extra={"fields": {"requests": admission.count, "seconds": doorway.drain_seconds}})
        with trio.move_on_after(doorway.drain_seconds * FINISH_SHARE):
            await admission.wait_empty()
        left = admission.cut_off()
        if left:
            _log.warning("the drain deadline cut requests off", extra={"fields": {"requests": left}})
            with trio.move_on_after(doorway.drain_seconds * (1 - FINISH_SHARE) / 2):
                await admission.wait_empty()
        close.set()


async def set_on_signals(stop: trio.Event, scope: trio.CancelScope) -> None:
    """Set `stop` at the first SIGTERM or SIGINT, cancel `scope` at the second.

    Cancellation: gives the signals back to whoever had them.
    """
    stopping = False  # a node may have begun to stop by itself, and then it is the first signal all the same
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            if stopping:
                scope.cancel()
            stopping = True
            stop.set()


def _tls(doorway: Doorway) -> ssl.SSLContext | None:
    """Return what TLS needs, None for plain HTTP; raises StartError for files that cannot be used."""
    if doorway.certificate is None and doorway.key is None:
        return None
    if doorway.certificate is None or doorway.key is None:
        raise StartError("tls.certificate and tls.key belong together: one of them is missing")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Without the password it would ask a terminal that nobody looks at.
        context.load_cert_chain(doorway.certificate, doorway.key, password="")
    except OSError as error:  # an ssl.SSLError too
        raise StartError(f"tls.certificate and tls.key cannot be used: {error.strerror or error}") from error
    return context


def _listen(doorway: Doorway) -> tuple[trio.SocketListener, str]:
    """Return a listener, whose sockets inherit its options, and its address."""
    family = socket.AF_INET6 if ":" in doorway.host else socket.AF_INET
    listener = socket.create_server((doorway.host, doorway.port), family=family, backlog=BACKLOG)
    # hypercorn's sends cannot be cancelled: the kernel ends a connection whose client reads nothing (RFC 5482).
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(doorway.stall_seconds * 1000))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if family == socket.AF_INET6 else host
    return trio.SocketListener(trio.socket.from_stdlib_socket(listener)), f"http://{shown}:{port}"
