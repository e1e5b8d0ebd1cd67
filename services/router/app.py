"""The router as an ASGI application: routes, and every error in the OpenAI form. Wiring only."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from asyncfabric.observe.spans import SpanRing
from asyncfabric_services.health.condition import Condition
from asyncfabric_services.health.endpoints import node_routes
from asyncfabric_services.health.view import View
from asyncfabric_services.router.admission import RequestAdmission
from asyncfabric_services.router.ask import Limits
from asyncfabric_services.router.backend import Backend
from asyncfabric_services.router.bodies import BodyRoom
from asyncfabric_services.router.fault import ApiFault
from asyncfabric_services.router.form import model_form, model_list
from asyncfabric_services.router.generation import Generation
from asyncfabric_services.router.meter import RouterMeter


def router_app(
    backend: Backend,
    admission: RequestAdmission,
    condition: Condition,
    registry: CollectorRegistry,
    limits: Limits,
    view: View | None = None,
    spans: SpanRing | None = None,
) -> Starlette:
    """Return the application.

    `admission` and `condition` are what a drain works on, `view` is what it shows, `spans` is
    where requests are recorded.
    """
    spans = spans or SpanRing()
    meter = RouterMeter(registry, lambda: admission.count, lambda: admission.waiting)

    async def models(_: Request) -> Response:
        return JSONResponse(model_list(backend.models()))

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        for card in backend.models():
            if card.name == name:
                return JSONResponse(model_form(card))
        return _answer(ApiFault(404, f"the model {name!r} does not exist here", param="model", code="model_not_found"))

    room = BodyRoom()
    completions = Generation(backend, admission, room, limits, meter, spans, chat=False)
    chat = Generation(backend, admission, room, limits, meter, spans, chat=True)
    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", model, methods=["GET"]),
        *node_routes(condition, registry, view),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _on_http, Exception: _on_bug})


def _answer(fault: ApiFault) -> Response:
    return JSONResponse(fault.plain(), fault.status, fault.headers())


async def _on_http(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    reason = {404: "there is no such path here", 405: "this path does not take this method"}.get(status, str(error))
    return _answer(ApiFault(status, f"{request.method} {request.url.path}: {reason}"))


async def _on_bug(_: Request, error: Exception) -> Response:
    return _answer(ApiFault(500, "the server failed; its log states why", kind="server_error"))
