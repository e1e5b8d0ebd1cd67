"""Who may ask a server: names in Host, keys of the API, JSON bodies, TLS. A real server over a small app."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the router needs starlette")
pytest.importorskip("hypercorn", reason="the router needs hypercorn")

import trio
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from asyncfabric_services.health.condition import Condition
from asyncfabric_services.router.admission import RequestAdmission
from asyncfabric_services.router.server import Doorway, StartError, serve_until
from asyncfabric_services.settings.sources import load_settings

pytestmark = pytest.mark.trio
KEYS = ("first-key-of-the-api", "second-key-of-the-api")
OWN = "content-type: application/json"


async def _fine(_: Any) -> JSONResponse:
    return JSONResponse({"fine": True})


@asynccontextmanager
async def serving(**doorway: Any) -> AsyncIterator[str]:
    """Serve until the block is left; gives the address."""
    routes = [Route("/v1/completions", _fine, methods=["POST"]), Route("/health", _fine)]
    condition, stop = Condition("n", "router"), trio.Event()
    send, listening = trio.open_memory_channel[str](1)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery, send, listening:
            app, way = Starlette(routes=routes), Doorway(drain_seconds=1.0, **doorway)
            nursery.start_soon(serve_until, app, RequestAdmission(condition, 8), condition, way, stop, send.send_nowait)
            yield await listening.receive()
            stop.set()


async def asked(
    address: str, *headers: str, path: str = "/v1/completions", host: str = "x", tls: ssl.SSLContext | None = None
) -> tuple[int, Any]:
    """Return the status and the JSON of an answer."""
    port = int(address.rpartition(":")[2])
    stream: trio.abc.Stream = await trio.open_tcp_stream("127.0.0.1", port)
    if tls is not None:
        stream = trio.SSLStream(stream, tls, server_hostname="localhost", https_compatible=True)
    verb = "POST" if path.startswith("/v1") else "GET"
    head = [f"{verb} {path} HTTP/1.1", f"host: {host}", "connection: close", "content-length: 0", *headers, "\r\n"]
    raw = b""
    async with stream:
        await stream.send_all("\r\n".join(head).encode())
        while piece := await stream.receive_some(65536):
            raw += piece
    body = raw.partition(b"\r\n\r\n")[2]
    return int(raw.split()[1]), json.loads(body)


async def test_each_of_the_keys_opens_the_api_and_nothing_else_does() -> None:
    async with serving(keys=KEYS) as address:
        for key in KEYS:
            assert await asked(address, OWN, f"authorization: Bearer {key}") == (200, {"fine": True})
        for given in ("", "Bearer ", f"Basic {KEYS[0]}", KEYS[0], f"Bearer {KEYS[0]}x", f"Bearer {KEYS[0][:-1]}"):
            status, reported = await asked(address, OWN, f"authorization: {given}")
            assert (status, reported["error"]["code"]) == (401, "invalid_api_key")
        assert (await asked(address, path="/health"))[0] == 200, "probes have no key"


@pytest.mark.parametrize("kind", ["", "content-type: text/plain", "content-type: application/x-www-form-urlencoded"])
async def test_a_body_that_is_not_stated_to_be_json_is_refused(kind: str) -> None:
    async with serving() as address:
        status, reported = await asked(address, *filter(None, [kind]))
        assert (status, reported["error"]["code"]) == (415, "unsupported_media_type")
        assert (await asked(address, f"{OWN}; charset=utf-8"))[0] == 200


async def test_only_names_that_are_not_of_foreign_sites_are_answered() -> None:
    async with serving(names=("Api.Example.net.",)) as address:
        for host in ("127.0.0.1:8000", "[::1]:80", "localhost", "router:8000", "API.example.net."):
            assert (await asked(address, OWN, host=host))[0] == 200, host
        for host in ("evil.example.org", "api.example.net.evil.org", "127.0.0.1.evil.org", "[::1", "x@evil.org"):
            for path in ("/v1/completions", "/health"):
                assert (await asked(address, OWN, host=host, path=path))[0] == 421, host


async def test_tls_by_certificate_files(tmp_path: Path) -> None:
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    made = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    try:
        await trio.run_process(
            [*new, *made, "-keyout", key, "-out", certificate], capture_stdout=True, capture_stderr=True
        )
    except FileNotFoundError:
        pytest.skip("the openssl command is not installed")
    context = ssl.create_default_context(cafile=str(certificate))
    async with serving(certificate=certificate, key=key, keys=KEYS[:1]) as address:
        assert address.startswith("https://127.0.0.1:")
        assert (await asked(address, OWN, f"authorization: Bearer {KEYS[0]}", tls=context))[0] == 200
        assert (await asked(address, OWN, tls=context))[0] == 401
    way = RequestAdmission(Condition("n", "router"), 8), Condition("n", "router")
    for first, second in ((certificate, None), (key, certificate), (certificate, tmp_path)):
        reason = "belong together" if second is None else "cannot be used"
        with pytest.raises(StartError, match=rf"tls\.certificate and tls\.key {reason}"):
            await serve_until(Starlette(), *way, Doorway(certificate=first, key=second), trio.Event(), print)


async def test_keys_of_the_api_come_from_flags_files_and_the_environment() -> None:
    variable = {"ASYNCFABRIC_API__KEY": ",".join(KEYS)}
    assert load_settings(environment=variable).settings.api.key == KEYS
    assert load_settings(environment=variable, flags={"api.key": KEYS[:1]}).settings.api.key == KEYS[:1]
    for wrong in ("short", "with a blank in the middle", ""):
        with pytest.raises(ValueError, match="16 to 512"):
            load_settings(environment={"ASYNCFABRIC_API__KEY": wrong})
