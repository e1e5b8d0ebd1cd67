"""Asking nodes over HTTP: one GET per connection, many nodes at once. On the event loop.

Written on trio's sockets and the standard library's parser, since the command must not need the packages of a server;
what a node does not answer is reported as text and harms no other node.
"""

from __future__ import annotations

import http.client
import io
import json
import ssl
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any, TypeVar
from urllib.parse import urlsplit

import trio

from asyncfabric.unreadable import UNREADABLE
from asyncfabric_services.terminal import plain

MOST_BYTES = 256 << 20
PIECE_BYTES = 1 << 18
_T = TypeVar("_T")


def run(asking: Callable[..., Awaitable[_T]], *arguments: Any) -> _T:
    """Return what `asking(*arguments)` returns, as trio.run does; Ctrl-C is raised as such and not in a group."""
    try:
        return trio.run(asking, *arguments)
    except BaseExceptionGroup as group:
        if group.subgroup(KeyboardInterrupt) is not None:
            raise KeyboardInterrupt from None
        raise


class NoAnswer(Exception):
    """A node did not answer, or not with what was asked for; the text states why, for people.

    Attributes:
        status: of the HTTP answer, 0 without one.
        late: whether there was none in time.
    """

    def __init__(self, text: str, status: int = 0, *, late: bool = False) -> None:
        super().__init__(plain(text))
        self.status = status
        self.late = late


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """What a node answered: `reported`, or the `trouble` with it."""

    url: str
    reported: Any = None
    trouble: str = ""


def checked_url(text: str) -> str:
    """Return `http://host:port`, or https, of what people write for it; raises ValueError for anything else."""
    url = text if "://" in text else f"http://{text}"
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or port is None
        or parts.path.strip("/")
        or parts.query
    ):
        raise ValueError(f"expected the HTTP address of a node such as http://127.0.0.1:8100, got {text!r}")
    return f"{parts.scheme}://{parts.netloc}"


@dataclass(frozen=True, slots=True)
class HttpExchange:
    """A question and its answer.

    Attributes:
        body: of the answer.
        sent_ns: before the question was sent, on time.monotonic_ns().
        came_ns: when the first piece of the answer had come.
    """

    body: str
    sent_ns: int
    came_ns: int


async def exchange(url: str, path: str, patience_s: float, *, most_bytes: int = MOST_BYTES) -> HttpExchange:
    """Ask for `url`/`path`.

    Raises:
        NoAnswer: nobody is there, the answer is late, longer than `most_bytes`, or a refusal.

    Cancellation: the connection is dropped.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    head = f"GET {path} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n\r\n"
    raw, sent_ns, came_ns = bytearray(), 0, 0
    with trio.move_on_after(patience_s) as in_time:
        try:
            async with await _connected(parts.scheme, parts.hostname, parts.port) as stream:
                sent_ns = monotonic_ns()
                await stream.send_all(head.encode())
                while piece := await stream.receive_some(PIECE_BYTES):
                    came_ns = came_ns or monotonic_ns()
                    raw += piece
                    if len(raw) > most_bytes:
                        raise NoAnswer(f"its answer is longer than {most_bytes} bytes")
        except (OSError, trio.BrokenResourceError) as error:
            reason = (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
            raise NoAnswer(reason) from None
    if in_time.cancelled_caught:
        raise NoAnswer(f"no whole answer within {patience_s:g} s", late=True)
    return HttpExchange(_body(bytes(raw), path), sent_ns, came_ns)


async def _connected(scheme: str, host: str, port: int) -> trio.abc.Stream:
    if scheme == "http":
        return await trio.open_tcp_stream(host, port)
    context = ssl.create_default_context()  # trusts what SSL_CERT_FILE names, too
    return await trio.open_ssl_over_tcp_stream(host, port, ssl_context=context, https_compatible=True)


async def ask(url: str, path: str, patience_s: float) -> Any:
    """Return the JSON at `url`/`path`; raises NoAnswer.

    Cancellation: the connection is dropped.
    """
    answer = await exchange(url, path, patience_s)
    try:
        return json.loads(answer.body)
    except UNREADABLE:
        raise NoAnswer("its answer is no JSON") from None


async def ask_all(urls: Iterable[str], asking: Callable[[str], Awaitable[Any]]) -> list[NodeAnswer]:
    """Ask all at once; return what `asking(url)` returned for each, or the NoAnswer that it raised, in their order.

    Cancellation: as that of `asking`.
    """
    wanted = list(dict.fromkeys(urls))
    answers: dict[str, NodeAnswer] = {}

    async def one(url: str) -> None:
        try:
            answers[url] = NodeAnswer(url, await asking(url))
        except NoAnswer as trouble:
            answers[url] = NodeAnswer(url, trouble=str(trouble))

    async with trio.open_nursery() as nursery:
        for url in wanted:
            nursery.start_soon(one, url)
    return [answers[url] for url in wanted]


class _Bytes:
    """A socket that is only read, as the parser of the standard library wants one."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, *_: Any, **__: Any) -> io.BytesIO:
        return io.BytesIO(self._raw)


def _body(raw: bytes, path: str) -> str:
    response = http.client.HTTPResponse(_Bytes(raw))  # type: ignore[arg-type]
    try:
        response.begin()
        text = response.read().decode()
    except (http.client.HTTPException, ValueError) as error:  # IncompleteRead: it died while it answered
        raise NoAnswer(f"its answer is broken: {type(error).__name__}") from None
    if response.status != 200:
        stated = text if len(text) <= 200 else f"{text[:200]}..."
        raise NoAnswer(f"{path} is answered with status {response.status}: {stated}", response.status)
    return text
