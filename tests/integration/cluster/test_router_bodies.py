"""Bodies of requests over real sockets: refused before they are read, bounded in sum, in nobody's way."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from http.client import HTTPConnection

import pytest

pytest.importorskip("hypercorn", reason="the router needs hypercorn")

import trio
import trio.testing
from scripted_backend import PATIENCE, Site, in_thread, open_site, receive_all, receive_until
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from test_router_http import samples

from asyncfabric_services.health.condition import Condition
from asyncfabric_services.router import app as router_application
from asyncfabric_services.router.admission import RequestAdmission
from asyncfabric_services.router.backend import ServedModel
from asyncfabric_services.router.bodies import MOST_BODY_BYTES, SHORT_BODY_BYTES, BodyRoom
from asyncfabric_services.router.generation import MIDDLE_BODY_BYTES
from asyncfabric_services.router.server import Doorway, serve_until
from asyncfabric_services.runner.tokenizer import ByteTokenizer

pytestmark = [pytest.mark.trio, pytest.mark.slow]
CHUNKED = {"content-type": "application/json", "transfer-encoding": "chunked"}
PATHS = ["/v1/completions", "/v1/chat/completions", "/health", "/nothing"]


def head_of(path: str, *headers: str) -> bytes:
    return "\r\n".join(
        [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", *headers, "\r\n"]
    ).encode()


@pytest.mark.parametrize("path", PATHS)
async def test_a_length_beyond_the_bound_is_refused_before_the_body_comes(path: str) -> None:
    async with open_site() as site, await site.connect() as stream:
        await stream.send_all(head_of(path, f"content-length: {MOST_BODY_BYTES + 1}"))
        head, _, body = (await receive_until(stream, b"}}")).partition(b"\r\n\r\n")
        assert b" 413 " in head.splitlines()[0]
        assert b"connection: close" in head
        assert json.loads(body)["error"]["code"] == "body_too_long"


@pytest.mark.parametrize("path", PATHS)
async def test_a_length_beside_a_coding_is_refused_and_nothing_behind_it_is_a_request(path: str) -> None:
    async with open_site() as site, await site.connect() as stream:
        behind = b"0\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        await stream.send_all(head_of(path, "content-length: 4", "transfer-encoding: chunked") + behind)
        answers = await receive_all(stream)
        assert answers.count(b"HTTP/1.1 ") == 1
        assert b" 400 " in answers.splitlines()[0]
        assert b"ambiguous_length" in answers


@pytest.mark.parametrize("path", ["/v1/completions", "/health"])
async def test_a_client_that_sends_more_than_is_read_gets_its_answer_and_is_let_go(path: str) -> None:
    """Bytes that nobody reads would keep hypercorn from ending the answer, and would reset the connection."""

    def post(port: int) -> int:
        client = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        part = b"x" * (1 << 20)
        client.request("POST", path, body=iter([part] * 12), encode_chunked=True, headers=CHUNKED)
        status = client.getresponse().status
        client.close()
        return status

    async with open_site() as site:
        assert await in_thread(post, site.port) == (405 if path == "/health" else 413)
        if path != "/health":
            await site.until(lambda: samples(site)["asyncfabric_router_requests_total completions 413"] == 1)


async def send_until_closed(stream: trio.SocketStream, data: bytes) -> None:
    with suppress(trio.ClosedResourceError):  # the test may close it before the cancellation of this task arrives
        await stream.send_all(data)


async def test_an_answer_ends_although_nobody_reads_the_body_that_came() -> None:
    """The queue of the body is full before the answer begins, and hypercorn puts the end of the stream behind it."""
    answer, ended, stop = trio.Event(), trio.Event(), trio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer.wait()
        await JSONResponse({})(scope, receive, send)
        ended.set()

    condition = Condition("n", "router")
    put, listening = trio.open_memory_channel[str](1)
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery, put, listening:
            way = Doorway(drain_seconds=1.0)
            nursery.start_soon(serve_until, app, RequestAdmission(condition, 8), condition, way, stop, put.send_nowait)
            port = int((await listening.receive()).rpartition(":")[2])
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                await stream.send_all(head_of("/", f"content-length: {MOST_BODY_BYTES}"))
                nursery.start_soon(send_until_closed, stream, bytes(MOST_BODY_BYTES))
                await trio.testing.wait_all_tasks_blocked(0.05)
                answer.set()
                await ended.wait()
                assert (await receive_until(stream, b"{}")).startswith(b"HTTP/1.1 200 ")
                nursery.cancel_scope.cancel()


async def test_long_bodies_beyond_the_sum_are_refused_while_short_ones_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = BodyRoom(100_000)
    monkeypatch.setattr(router_application, "BodyRoom", lambda: room)
    async with open_site() as site:
        held = await site.connect()
        await held.send_all(head_of("/v1/completions", "content-length: 90000") + b"{" + b" " * 79_999)
        await site.until(lambda: room.held == 80_000)
        long = {"model": "tiny", "prompt": "x", "user": "y" * 30_000}
        async with await site.post("/v1/completions", long) as refused:
            answer = await receive_until(refused, b"}}")
            assert b" 503 " in answer.splitlines()[0]
            assert b"retry-after: 1" in answer
        assert await status_of(site, {"model": "tiny", "prompt": "x", "max_tokens": 2}) == 200
        await held.aclose()
        await site.until(lambda: room.held == 0)
        assert await status_of(site, long | {"max_tokens": 2}) == 200
        assert room.held == 0


async def status_of(site: Site, body: object) -> int:
    async with await site.post("/v1/completions", body) as stream:
        return int((await receive_until(stream, b"\r\n")).split()[1])


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ([f"content-length: {MOST_BODY_BYTES + 1}"], b"body_too_long"),
        (["content-length: 4", "transfer-encoding: chunked"], b"ambiguous_length"),
        (["content-length: 4", "x-asyncfabric-deadline: never"], b"expected"),
    ],
)
async def test_who_waits_for_100_continue_is_refused_without_it(headers: list[str], code: bytes) -> None:
    async with open_site() as site, await site.connect() as stream:
        await stream.send_all(head_of("/v1/completions", "expect: 100-continue", *headers))
        answers = await receive_all(stream)
        assert answers.count(b"HTTP/1.1 ") == 1 and code in answers, answers


async def test_who_waits_for_100_continue_gets_it_when_the_body_is_read_and_again_for_the_next_request() -> None:
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 2}).encode()
    head = head_of("/v1/completions", "expect: 100-continue", f"content-length: {len(body)}")
    async with open_site() as site, await site.connect() as stream:
        for _ in range(2):
            await stream.send_all(head)
            assert (await receive_until(stream, b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
            await stream.send_all(body)
            answer = await receive_until(stream, b"}}")
            assert answer.startswith(b"HTTP/1.1 200 ") and answer.count(b"HTTP/1.1 ") == 1


class Gated(ByteTokenizer):
    """Makes tokens of long prompts when the test lets it."""

    def __init__(self) -> None:
        self.begun, self.going_on = threading.Event(), threading.Event()
        self.gated = MIDDLE_BODY_BYTES

    def encode(self, text: str) -> list[int]:
        if len(text) > self.gated:
            self.begun.set()
            assert self.going_on.wait(PATIENCE)
        return super().encode(text)


async def test_no_body_waits_for_a_longer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Gated()
    async with open_site() as site:
        monkeypatch.setattr(site.backend, "models", lambda: [ServedModel("tiny", tokenizer, 1 << 20)])
        ask = {"model": "tiny", "max_tokens": 2}
        async with await site.post("/v1/completions", ask | {"prompt": "x" * (MIDDLE_BODY_BYTES + 1)}) as longest:
            assert await in_thread(tokenizer.begun.wait, PATIENCE)
            for length in (1, SHORT_BODY_BYTES + 1, MIDDLE_BODY_BYTES // 2):
                with trio.fail_after(PATIENCE):
                    assert await status_of(site, ask | {"prompt": "x" * length}) == 200
            tokenizer.going_on.set()
            assert b" 200 " in await receive_until(longest, b"\r\n")


@pytest.mark.parametrize("length", [MIDDLE_BODY_BYTES + 1, 4 * SHORT_BODY_BYTES])
async def test_a_client_that_leaves_waits_for_no_body_thread(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    room, tokenizer = BodyRoom(), Gated()
    monkeypatch.setattr(router_application, "BodyRoom", lambda: room)
    async with open_site() as site:
        monkeypatch.setattr(site.backend, "models", lambda: [ServedModel("tiny", tokenizer, 1 << 20)])
        monkeypatch.setattr(tokenizer, "gated", length - 1)
        ask = {"model": "tiny", "max_tokens": 2, "prompt": "x" * length}
        async with await site.post("/v1/completions", ask) as first:
            assert await in_thread(tokenizer.begun.wait, PATIENCE)
            one = room.held
            second = await site.post("/v1/completions", ask)
            await site.until(lambda: room.held == 2 * one)
            await second.aclose()
            await site.until(lambda: room.held == one)
            assert samples(site)["asyncfabric_router_requests_total completions 499"] == 1
            tokenizer.going_on.set()
            assert b" 200 " in await receive_until(first, b"\r\n")


async def test_a_prompt_that_cannot_fit_keeps_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Gated()  # never let go on: tokens of such a prompt would be waited for
    async with open_site() as site:
        monkeypatch.setattr(site.backend, "models", lambda: [ServedModel("tiny", tokenizer, 2048)])
        prompt = {"model": "tiny", "prompt": "x" * (MIDDLE_BODY_BYTES + 1)}
        with trio.fail_after(PATIENCE / 2):
            assert await status_of(site, prompt) == 400
        assert not tokenizer.begun.is_set()
