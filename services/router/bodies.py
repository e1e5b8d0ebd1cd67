"""Bodies of requests before they are read: how long one may be, how its length is written, and the sum held at once.

Runs on the event loop. The sum is of one application; the rest is for every HTTP port of a node.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from asyncfabric_services.router.fault import ApiFault, bodies_full

MOST_BODY_BYTES = 8 << 20
MOST_HELD_BYTES = 64 << 20
SHORT_BODY_BYTES = 16 << 10
"""A body up to this length is always taken: what is short never waits for what is long."""


def fault_of_head(scope: Scope) -> ApiFault | None:
    """Return what to answer, and to close the connection with, before a body is read; None when it may be read.

    A length and a coding together are refused: a proxy in front may have taken the other one for the end of the body,
    and what follows for a request of its own (RFC 9112, 6.1).
    """
    headers = Headers(scope=scope)
    length = headers.get("content-length")
    if length is None:
        return None
    if "transfer-encoding" in headers:
        message = "the request has content-length and transfer-encoding: send one of them"
        return ApiFault(400, message, code="ambiguous_length")
    return body_too_long() if int(length) > MOST_BODY_BYTES else None  # h11 takes digits only


def body_too_long() -> ApiFault:
    """Return the answer to a body that is longer than any may be."""
    return ApiFault(413, f"the body is longer than {MOST_BODY_BYTES} bytes", code="body_too_long")


class BodyRoom:
    """The bytes of long bodies that requests hold together; `most_bytes` bounds them.

    What has come is counted and not what was announced: who announces much and sends nothing takes no room.
    """

    def __init__(self, most_bytes: int = MOST_HELD_BYTES) -> None:
        self._most = most_bytes
        self.held = 0

    @contextmanager
    def body(self) -> Iterator[HeldBody]:
        """Count one body until the scope is left."""
        body = HeldBody(self)
        try:
            yield body
        finally:
            self.held -= body.counted

    def take(self, count: int) -> None:
        """Count bytes more; raises ApiFault 503 when there is no room for them."""
        if self.held + count > self._most:
            raise bodies_full(self.held, self._most)
        self.held += count


class HeldBody:
    """The length of one body as it comes."""

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._length = 0
        self.counted = 0

    def grow(self, count: int) -> None:
        """Add bytes that came; raises ApiFault 413 past MOST_BODY_BYTES, and 503 when the room is full."""
        self._length += count
        if self._length > MOST_BODY_BYTES:
            raise body_too_long()
        if self._length > SHORT_BODY_BYTES:
            self._room.take(self._length - self.counted)
            self.counted = self._length


def dropping(receive: Receive, send: Send) -> Send:
    """Return a send that drops what is left of the body while it sends the last of an answer.

    hypercorn reports the end of a stream through the queue of the body: full of a body that nobody reads, it would hold
    the application in its send for ever.
    """

    async def drop() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def send_on(message: Message) -> None:
        if message["type"] != "http.response.body" or message.get("more_body", False):
            await send(message)
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drop)
            await send(message)
            nursery.cancel_scope.cancel()

    return send_on
