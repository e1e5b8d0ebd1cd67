"""`/health` and `/metrics` as Starlette routes, for any node. Read-only; runs on the event loop.

`/health` answers 200 when the node is ready and 503 when it is not, so that load balancers and readiness probes
need not read the body.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from asyncfabric_services.health.condition import Condition
from asyncfabric_services.health.metrics import CONTENT_TYPE, exposition


def node_routes(condition: Condition, registry: CollectorRegistry) -> list[Route]:
    """Return the two routes."""

    async def health(_: Request) -> Response:
        return JSONResponse(condition.plain(), 200 if condition.ready else 503)

    async def metrics(_: Request) -> Response:
        return Response(exposition(registry), media_type=CONTENT_TYPE)

    return [Route("/health", health, methods=["GET"]), Route("/metrics", metrics, methods=["GET"])]
