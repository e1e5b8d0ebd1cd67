"""What every node answers over HTTP: health, `/metrics`, and its view as JSON. Read-only; runs on the event loop.

`/health/ready`, and `/health` by its short name, answer 200 when the node is ready and 503 when it is not, so that load
balancers and readiness probes need not read the body. `/health/live` answers 200 as long as the process does its part:
a node that waits for its directory is alive, and is not helped by a restart. The pages of the view are `/why`,
`/peers`, `/regions` and those of the role; `/look` has what is shown of a running node in one answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from asyncfabric.errors import FabricError
from asyncfabric_services.health.condition import Condition
from asyncfabric_services.health.metrics import CONTENT_TYPE, exposition, values
from asyncfabric_services.health.view import Rows, View

LOOKED: Final = ("why", "peers", "updates")
"""The pages that `/look` has, beside health and metrics."""


def node_routes(condition: Condition, registry: CollectorRegistry, view: View | None = None) -> list[Route]:
    """Return the routes; a node without a view has those of its health and metrics."""

    async def ready(_: Request) -> Response:
        return JSONResponse(condition.plain(), 200 if condition.ready else 503)

    async def live(_: Request) -> Response:
        return JSONResponse(condition.plain(), 200 if condition.alive else 503)

    async def metrics(_: Request) -> Response:
        return Response(exposition(registry), media_type=CONTENT_TYPE)

    pages = view.pages() if view is not None else {}

    async def look(_: Request) -> Response:
        def shown() -> dict[str, Any]:
            return {name: list(pages[name]()) for name in LOOKED if name in pages} | {"metrics": values(registry)}

        return _answer({"health": condition.plain()}, shown)

    return [
        Route("/health", ready, methods=["GET"]),
        Route("/health/ready", ready, methods=["GET"]),
        Route("/health/live", live, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/look", look, methods=["GET"]),
        *(_page(condition, name, rows) for name, rows in pages.items()),
    ]


def _page(condition: Condition, name: str, rows: Rows) -> Route:
    async def page(_: Request) -> Response:
        return _answer({"node": condition.name, "role": condition.role}, lambda: {name: list(rows())})

    return Route(f"/{name}", page, methods=["GET"], name=name)


def _answer(reported: dict[str, Any], more: Callable[[], dict[str, Any]]) -> Response:
    try:
        return JSONResponse(reported | more())
    except FabricError as error:  # the node is closing what it would show
        return JSONResponse(reported | {"error": str(error)}, 503)
