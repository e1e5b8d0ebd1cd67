"""From the settings of a node to where and how its HTTP endpoint listens, and who may come in. Pure."""

from __future__ import annotations

from asyncfabric_services.health.condition import Condition
from asyncfabric_services.router.admission import RequestAdmission
from asyncfabric_services.router.server import Doorway
from asyncfabric_services.settings.schema import Settings


def doorway_of(settings: Settings, *, api: bool) -> Doorway:
    """Return the doorway of a node; keys and TLS are for those that answer the API."""
    http = settings.http
    names = tuple(name.strip() for name in http.names.split(",") if name.strip())
    plain = Doorway(http.host, http.port, http.drain, http.stall, names)
    if not api:
        return plain
    tls = settings.tls
    return Doorway(http.host, http.port, http.drain, http.stall, names, settings.api.key, tls.certificate, tls.key)


def queueing(condition: Condition, settings: Settings) -> RequestAdmission:
    """Return the admission of a node that answers the API, where requests wait for their turn."""
    router = settings.router
    return RequestAdmission(condition, router.most_requests, router.most_waiting, router.longest_wait)
