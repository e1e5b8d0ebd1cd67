"""What comes in with a request: its body, its deadline, and the news that the client has gone. On the event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from asyncfabric.observe.spans import read_context
from asyncfabric_services.quantities import parse_duration
from asyncfabric_services.router.bodies import HeldBody
from asyncfabric_services.router.fault import ApiFault, body_late

DEADLINE_HEADER = "x-asyncfabric-deadline"

_Result = TypeVar("_Result")


class ClientGone(Exception):
    """The client closed its connection before it had asked."""


async def read_body(receive: Receive, seconds: float, held: HeldBody) -> bytes:
    """Return the whole body.

    Raises ApiFault 408 when it took longer than `seconds`, those of `held`, and ClientGone when the client leaves.

    Cancellation: what came is lost.
    """
    with trio.move_on_after(seconds):
        return await _whole(receive, held)
    raise body_late(seconds)


async def _whole(receive: Receive, held: HeldBody) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        held.grow(len(part))
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def read_deadline(scope: Scope, most_seconds: float) -> float:
    """Return the seconds that the request may take: the value of its header, at most `most_seconds`."""
    text = Headers(scope=scope).get(DEADLINE_HEADER)
    if text is None:
        return most_seconds
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise ApiFault(400, f"header {DEADLINE_HEADER}: {error}", param=DEADLINE_HEADER) from None
    if seconds <= 0:
        raise ApiFault(400, f"header {DEADLINE_HEADER}: expected more than 0, got {text!r}", param=DEADLINE_HEADER)
    return min(seconds, most_seconds)


def read_trace(scope: Scope) -> str:
    """Return the W3C trace context that the request came with, empty when it has none that can be used."""
    headers = Headers(scope=scope)
    return read_context(headers.get("traceparent", ""), ",".join(headers.getlist("tracestate")))


async def unless_gone(receive: Receive, call: Callable[[], Awaitable[_Result]]) -> _Result:
    """Return what `call` returns, once the body was read; raises what it raises, and ClientGone when the client leaves.

    A call that cannot be cancelled is waited for all the same.

    Cancellation: cancels the call.
    """
    watching, failure = trio.CancelScope(), None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_gone, receive, watching, nursery.cancel_scope)
        try:
            result = await call()
        except Exception as error:
            failure = error  # raised outside: a nursery would wrap it
        watching.cancel()
    if nursery.cancel_scope.cancel_called:
        raise ClientGone
    if failure is not None:
        raise failure
    return result


async def wait_gone(receive: Receive, watching: trio.CancelScope, scope: trio.CancelScope) -> None:
    """Cancel `scope` when the client has closed its connection; returns without that when `watching` is cancelled.

    Cancellation: ends the watch.
    """
    with watching:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()
