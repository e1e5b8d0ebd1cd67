"""What every node answers over HTTP: `/health`, `/metrics`, and its view as JSON. Read-only; runs on the event loop.

`/health` answers 200 when the node is ready and 503 when it is not, so that load balancers and readiness probes
need not read the body. The pages of the view are `/why`, `/peers`, `/regions` and those of the role.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from asyncfabric.errors import FabricError
from asyncfabric_services.health.condition import Condition
from asyncfabric_services.health.metrics import CONTENT_TYPE, exposition
from asyncfabric_services.health.view import Rows, View


def node_routes(condition: Condition, registry: CollectorRegistry, view: View | None = None) -> list[Route]:
    """Return the routes; a node without a view has the first two."""

    async def health(_: Request) -> Response:
        return JSONResponse(condition.plain(), 200 if condition.ready else 503)

    async def metrics(_: Request) -> Response:
        return Response(exposition(registry), media_type=CONTENT_TYPE)

    return [
        Route("/health", health, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        *(_page(condition, name, rows) for name, rows in (view.pages() if view is not None else {}).items()),
    ]


def _page(condition: Condition, name: str, rows: Rows) -> Route:
    async def page(_: Request) -> Response:
        told = {"node": condition.name, "role": condition.role}
        try:
            return JSONResponse(told | {name: list(rows())})
        except FabricError as error:  # the node is closing what it would show
            return JSONResponse(told | {"error": str(error)}, 503)

    return Route(f"/{name}", page, methods=["GET"], name=name)
