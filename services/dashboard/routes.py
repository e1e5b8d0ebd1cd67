"""The page, its files and `/events` over HTTP. Read-only; on the event loop. Access is that of all pages of a node."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Final

import trio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from asyncfabric.control import DirectoryClient, Link
from asyncfabric_services.dashboard.feed import DashboardFeed
from asyncfabric_services.dashboard.poll import DashboardPoll, Members
from asyncfabric_services.router.incoming import wait_gone

BEAT_SECONDS = 10.0  # between signs of life, so that one that has gone is noticed
MOST_VIEWERS = 64
HEADERS: Final = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
KINDS: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@asynccontextmanager
async def open_dashboard(link: Link, members: Members, stop: trio.Event) -> AsyncIterator[list[Route]]:
    """Hold the dashboard of the directory on this link open and give its routes; viewers are sent away at `stop`.

    Cancellation: nothing is left over.
    """
    feed = DashboardFeed()
    poll = DashboardPoll(feed, members)

    async def end_at_stop() -> None:
        await stop.wait()
        feed.end()

    async with DirectoryClient(link, link.address) as client, trio.open_nursery() as nursery:
        nursery.start_soon(poll.run)
        nursery.start_soon(poll.follow, client)
        nursery.start_soon(end_at_stop)
        yield dashboard_routes(feed, poll)
        nursery.cancel_scope.cancel()


def dashboard_routes(feed: DashboardFeed, poll: DashboardPoll) -> list[Route]:
    """Return the routes; the files are read once."""
    content = {
        file.name: (file.read_bytes(), kind)
        for file in files("asyncfabric_services.dashboard").joinpath("static").iterdir()
        if (kind := KINDS.get(file.name[file.name.rfind(".") :]))
    }

    async def page(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in content:
            return JSONResponse({"error": f"the dashboard has no file {name!r}"}, 404)
        body, kind = content[name]
        return Response(body, 200, HEADERS, kind)

    async def events(request: Request) -> Response:
        if feed.ended or poll.viewers >= MOST_VIEWERS:
            reason = "the directory drains" if feed.ended else f"{MOST_VIEWERS} viewers look already"
            return JSONResponse({"error": reason}, 503, {"retry-after": "2"})
        return _EventStream(feed, poll, request.headers.get("last-event-id", ""))

    return [
        Route("/", page, methods=["GET"]),
        Route("/dashboard/{name}", page, methods=["GET"]),
        Route("/events", events, methods=["GET"]),
    ]


class _EventStream(Response):
    """Server-sent events until the viewer leaves, or the feed ends."""

    media_type = "text/event-stream"

    def __init__(self, feed: DashboardFeed, poll: DashboardPoll, last_id: str) -> None:
        super().__init__(None, 200, HEADERS | {"cache-control": "no-store"}, self.media_type)
        del self.headers["content-length"]
        self._feed = feed
        self._poll = poll
        self._last_id = last_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer.

        Cancellation: the viewer is one less.
        """
        with self._poll.viewing():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_gone, receive, trio.CancelScope(), nursery.cancel_scope)
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                position = self._feed.position_of(self._last_id)
                while not self._feed.ended:
                    body, position = self._feed.due(position)
                    await send({"type": "http.response.body", "body": body or b": alive\n\n", "more_body": True})
                    with trio.move_on_after(BEAT_SECONDS):
                        await self._feed.wait_after(position)
                nursery.cancel_scope.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
