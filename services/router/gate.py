"""Who may ask: the names that a server answers to, the keys of its API, and JSON as the only kind of a body.

Pure but for the ASGI calls; runs before a body is read. A page of a foreign site in a browser can post forms and text
to a server of this host, and under a name of its own that resolves to it read the answers: it cannot post JSON without
asking first, and its name has a dot and is none of ours.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Iterable
from hashlib import sha256
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from asyncfabric_services.router.fault import ApiFault

API = "/v1/"
JSON = "application/json"


class HttpGate:
    """An application behind its gate.

    Args:
        app: what is asked.
        names: names that `Host` may have beside addresses, this host's name and names without a dot; `*` for any.
        keys: of which one has to come with each request of the API; none: whoever reaches the server may ask.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str] = (), keys: Iterable[str] = ()) -> None:
        self._app = app
        self._names = {name.lower().rstrip(".") for name in (*names, socket.gethostname(), socket.getfqdn()) if name}
        self._keys = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let the application answer.

        Cancellation: as that of the application.
        """
        fault = self._fault(scope) if scope["type"] == "http" else None
        if fault is None:
            await self._app(scope, receive, send)
            return
        headers = {"www-authenticate": "Bearer"} if fault.status == 401 else {}
        await JSONResponse(fault.plain(), fault.status, headers)(scope, receive, send)

    def _fault(self, scope: Scope) -> ApiFault | None:
        headers = Headers(scope=scope)
        host = headers.get("host")
        if host is not None and not self._serves(host):
            message = f"this server does not answer to the name {host!r}: add it to http.names if it is one of its own"
            return ApiFault(421, message, code="unknown_host")
        if not scope["path"].startswith(API):
            return None
        if self._keys and not self._has_key(headers.get("authorization", "")):
            message = "the API wants a key of this server: send `Authorization: Bearer KEY`"
            return ApiFault(401, message, code="invalid_api_key")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != JSON:
            return ApiFault(415, f"the body has to come with `Content-Type: {JSON}`", code="unsupported_media_type")
        return None

    def _serves(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        if "*" in self._names or name in self._names:
            return True
        try:
            ipaddress.ip_address(name.partition("%")[0])
        except ValueError:
            return name != "" and "." not in name  # no name of a foreign site: those stand in a domain
        return True

    def _has_key(self, authorization: str) -> bool:
        """Compare with every key, in a time that shows neither which one is nearest nor how long any is."""
        scheme, _, given = authorization.partition(" ")
        digest = _digest(given.strip().encode(errors="replace"))
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()
