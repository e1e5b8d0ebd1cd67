"""The router over real sockets: the openai client, raw HTTP, clients that leave, deadlines, overload and drains."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="the router is tested with the openai client")
pytest.importorskip("hypercorn", reason="the router needs hypercorn")

import trio  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402
from scripted_backend import ANSWER, Site, in_thread, open_site, receive_all, receive_until  # noqa: E402

from asyncfabric.errors import BusyError, PeerError  # noqa: E402
from asyncfabric_services.health.metrics import exposition  # noqa: E402
from asyncfabric_services.router.meter import PRIORITIES  # noqa: E402

pytestmark = [pytest.mark.trio, pytest.mark.slow]
TEXT = ANSWER.decode()
CHAT = [{"role": "user", "content": "hi"}]


async def with_client(site: Site, use: Callable[[Any], Any]) -> Any:
    """Run `use` with an OpenAI client on a thread."""

    def call() -> Any:
        with openai.OpenAI(base_url=f"{site.address}/v1", api_key="none", max_retries=0) as client:
            return use(client)

    return await in_thread(call)


async def refused(site: Site, use: Callable[[Any], Any]) -> Any:
    """Return the error of the client's class that a call raises."""
    with pytest.raises(openai.APIStatusError) as caught:
        await with_client(site, use)
    return caught.value


def complete(**fields: Any) -> Callable[[Any], Any]:
    return lambda client: client.completions.create(**({"model": "tiny", "prompt": "hello"} | fields))


def samples(site: Site) -> dict[str, float]:
    return {
        " ".join([one.name, *one.labels.values()]): one.value
        for family in text_string_to_metric_families(exposition(site.registry).decode())
        for one in family.samples
    }


async def test_the_openai_client_completes_and_chats() -> None:
    async with open_site() as site:
        whole = await with_client(site, complete(max_tokens=9))
        assert whole.choices[0].text == TEXT[:9]
        assert whole.choices[0].finish_reason == "length"
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (5, 9, 14)
        chat = await with_client(
            site, lambda client: client.chat.completions.create(model="tiny", messages=CHAT, stop="brown")
        )
        assert chat.choices[0].message.content == "The quick "
        assert (chat.choices[0].message.role, chat.choices[0].finish_reason) == ("assistant", "stop")
        assert [model.id for model in await with_client(site, lambda client: client.models.list().data)] == ["tiny"]
        assert (await with_client(site, lambda client: client.models.retrieve("tiny"))).id == "tiny"


async def test_the_openai_client_streams() -> None:
    async with open_site() as site:
        parts = await with_client(
            site, lambda client: list(client.completions.create(model="tiny", prompt="x", max_tokens=9, stream=True))
        )
        assert "".join(part.choices[0].text for part in parts) == TEXT[:9]
        assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
        options = {"include_usage": True}
        chat = await with_client(
            site,
            lambda client: list(
                client.chat.completions.create(
                    model="tiny", messages=CHAT, max_tokens=9, stream=True, stream_options=options, stop=["row"]
                )
            ),
        )
        assert "".join(part.choices[0].delta.content or "" for part in chat if part.choices) == TEXT[:9]
        assert chat[0].choices[0].delta.role == "assistant"
        assert chat[-1].usage.completion_tokens == 9
        assert all(part.usage is None for part in chat[:-1])
        assert len({part.id for part in chat}) == 1


async def test_refusals_are_errors_of_the_clients_own_classes() -> None:
    async with open_site() as site:
        missing = await refused(site, complete(model="gpt"))
        assert isinstance(missing, openai.NotFoundError)
        assert (missing.code, missing.param) == ("model_not_found", "model")
        long = await refused(site, complete(prompt="x" * 1001))
        assert isinstance(long, openai.BadRequestError)
        assert long.code == "context_length_exceeded"
        typed = await refused(site, complete(temperature="hot"))
        assert isinstance(typed, openai.BadRequestError)
        site.backend.refusal = BusyError("12 requests run")
        for stream in (False, True):
            busy = await refused(site, complete(stream=stream))
            assert isinstance(busy, openai.RateLimitError)
            assert busy.response.headers["retry-after"] == "1"
        site.backend.refusal = PeerError("decode node d1 died")
        dead = await refused(site, complete())
        assert (dead.status_code, dead.code) == (502, "backend_failed")
        assert "d1 died" in dead.message
        site.backend.refusal = RuntimeError("a secret of the server")
        bug = await refused(site, complete(stream=True))
        assert bug.status_code == 500
        assert "secret" not in bug.message
        gone = await refused(site, lambda client: client.models.retrieve("gpt"))
        assert gone.status_code == 404


async def test_an_error_in_the_middle_of_a_stream_reaches_the_client() -> None:
    async with open_site() as site:
        site.backend.permits, site.backend.failure = 5, PeerError("decode node d1 died")

        def use(client: Any) -> tuple[str, Any]:
            stated = ""
            with pytest.raises(openai.APIError) as caught:
                for part in client.completions.create(model="tiny", prompt="x", stream=True):
                    stated += part.choices[0].text
            return stated, caught.value

        stated, error = await with_client(site, use)
        assert stated == TEXT[:5]
        assert "d1 died" in error.message


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", 405),
        (b"GET /nothing HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", 404),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: 3\r\n\r\n{{{",
            400,
        ),
        (b"POST /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n", 405),
    ],
)
async def test_every_refusal_has_the_form_of_the_api(request_bytes: bytes, status: int) -> None:
    async with open_site() as site, await site.connect() as stream:
        await stream.send_all(request_bytes)
        head, _, body = (await receive_all(stream)).partition(b"\r\n\r\n")
        assert int(head.split()[1]) == status
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


async def test_a_body_without_end_is_refused_before_memory_is() -> None:
    async with open_site() as site, await site.connect() as stream:
        await stream.send_all(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )

        async def pour() -> None:
            chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
            try:
                for _ in range(1000):
                    await stream.send_all(chunk)
            except trio.BrokenResourceError:
                pass  # the server has closed, as it may

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pour)
            assert b"413" in (await receive_until(stream, b"\r\n")).splitlines()[0]
            nursery.cancel_scope.cancel()


async def test_a_body_that_does_not_come_is_refused_at_the_deadline() -> None:
    async with open_site(deadline=0.3) as site, await site.connect() as stream:
        await stream.send_all(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 30\r\n\r\n{"
        )
        reported = await receive_all(stream)
        assert b" 408 " in reported.splitlines()[0] and b"body_late" in reported


@pytest.mark.parametrize("stream_mode", [False, True])
@pytest.mark.parametrize("permits", [0, 3])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_client_that_leaves_cancels_its_request(stream_mode: bool, permits: int, path: str) -> None:
    async with open_site() as site:
        site.backend.permits = permits
        asked = {"prompt": "x"} if path == "/v1/completions" else {"messages": CHAT}
        stream = await site.post(path, {"model": "tiny", "stream": stream_mode, **asked})
        await site.until(lambda: len(site.backend.inside) == 1 and site.backend.stated == permits)
        if stream_mode and permits:
            await receive_until(stream, b"data: ")
        await stream.aclose()
        await site.until(lambda: len(site.backend.left) == 1)
        await site.until(lambda: site.admission.count == 0)
        endpoint = "completions" if path == "/v1/completions" else "chat"
        await site.until(lambda: samples(site)[f"asyncfabric_router_requests_total {endpoint} 499"] == 1)


async def test_a_client_that_leaves_with_the_last_token_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def tokens(_: object) -> AsyncGenerator[int, None]:
        yield ANSWER[0]
        with suppress(trio.Cancelled):  # the answer ends in the turn of the loop in which the client's end was received
            await trio.sleep_forever()

    async with open_site() as site:
        monkeypatch.setattr(site.backend, "_tokens", tokens)
        async with await site.post("/v1/completions", {"model": "tiny", "prompt": "x", "stream": True}) as stream:
            await receive_until(stream, b"data: ")
        await site.until(lambda: len(site.backend.left) == 1 and site.admission.count == 0)
    assert "failed" not in caplog.text


async def test_a_client_that_stops_reading_holds_neither_backend_nor_drain() -> None:
    async with open_site(drain=4, stall=0.5) as site:
        count = site.backend.max_tokens = 40_000  # some megabytes of events: more than the kernel takes
        body = json.dumps({"model": "tiny", "prompt": "x", "stream": True, "max_tokens": count - 1}).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % len(body)
        )
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await in_thread(client.connect, ("127.0.0.1", site.port))
            client.send(head + body)
            await site.until(lambda: len(site.backend.left) == 1)  # not one byte was read
            site.stop.set()
            await site.until(site.ended.is_set)
        gone = samples(site)["asyncfabric_router_requests_total completions 499"]
        assert gone == 1, "the kernel took it all: nothing was tested"


@pytest.mark.parametrize("stream_mode", [False, True])
async def test_the_deadline_is_an_answer(stream_mode: bool) -> None:
    async with open_site(deadline=0.3) as site:
        site.backend.permits = 0
        late = await refused(site, complete(stream=stream_mode))
        assert (late.status_code, late.code) == (504, "deadline_exceeded")
        assert "0.3 s passed after 0 tokens" in late.message
        await site.until(lambda: len(site.backend.left) == 1)


async def test_the_deadline_of_a_stream_that_began_is_an_event() -> None:
    async with open_site() as site:
        site.backend.permits = 4
        body = {"model": "tiny", "prompt": "x", "stream": True}
        async with await site.post("/v1/completions", body, "x-asyncfabric-deadline: 300ms") as stream:
            data = await receive_until(stream, b"deadline_exceeded")
        assert b" 200 " in data.splitlines()[0]
        assert b"[DONE]" not in data
        await site.until(lambda: len(site.backend.left) == 1)


async def test_a_deadline_that_is_none_is_refused() -> None:
    async with open_site() as site:
        for text in ("soon", "0s", "-1s"):
            wrong = await refused(site, complete(extra_headers={"x-asyncfabric-deadline": text}))
            assert (wrong.status_code, wrong.param) == (400, "x-asyncfabric-deadline")


async def test_one_request_too_many_is_429_and_the_next_is_welcome() -> None:
    async with open_site(most_requests=1) as site:
        site.backend.permits = 0
        stream = await site.post("/v1/completions", {"model": "tiny", "prompt": "x"})
        await site.until(lambda: len(site.backend.inside) == 1)
        busy = await refused(site, complete())
        assert isinstance(busy, openai.RateLimitError)
        assert busy.response.headers["retry-after"] == "1"
        await stream.aclose()
        await site.until(lambda: site.admission.count == 0)
        site.backend.permits = 100
        assert (await with_client(site, complete(max_tokens=3))).choices[0].text == TEXT[:3]


async def test_those_who_wait_come_by_priority_and_one_too_many_is_429() -> None:
    """A client that leaves while it waits leaves the queue; one whose deadline passes there is answered so."""
    async with open_site(most_requests=1, most_waiting=4) as site, trio.open_nursery() as nursery:
        site.backend.permits = 0
        answered: list[str] = []

        async def ask(prompt: str, priority: int | None, *headers: str) -> None:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 2} | ({"priority": priority} if priority else {})
            async with await site.post("/v1/completions", body, "connection: close", *headers) as stream:
                head = await receive_until(stream, b"\r\n")
                answered.append(f"{prompt} {head.split()[1].decode()}")

        for count, (prompt, priority) in enumerate([("inside", 9), ("last", 5), ("middle", None), ("first", -100)]):
            nursery.start_soon(ask, prompt, priority)
            await site.until(lambda seen=count: site.admission.count + site.admission.waiting == seen + 1)
        leaving = await site.post("/v1/completions", {"model": "tiny", "prompt": "x", "priority": -50})
        await site.until(lambda: site.admission.waiting == 4)
        busy = await refused(site, complete())
        assert isinstance(busy, openai.RateLimitError) and busy.response.headers["retry-after"] == "1"
        await leaving.aclose()
        await site.until(lambda: site.admission.waiting == 3)
        nursery.start_soon(ask, "late", None, "x-asyncfabric-deadline: 1s")
        await site.until(lambda: answered == ["late 504"] and site.admission.waiting == 3)
        assert samples(site)["asyncfabric_router_waiting_requests"] == 3
        assert len(site.backend.inside) == 1
        site.backend.permit(100)
        await site.until(lambda: len(answered) == 5)
        waited = {name: samples(site)[f"asyncfabric_router_waited_requests_total {name}"] for name in PRIORITIES}
        assert waited == {"above": 2, "default": waited["default"], "below": 1} and waited["default"] in (1, 2)
        assert sum(samples(site)[f"asyncfabric_router_waited_seconds_total {name}"] for name in PRIORITIES) > 0
        assert [bytes(request.prompt).decode() for request in site.backend.left] == [
            "inside",
            "first",
            "middle",
            "last",
        ]
        assert sorted(answered[1:]) == ["first 200", "inside 200", "last 200", "middle 200"]
        wrong = await refused(site, complete(extra_body={"priority": 101}))
        assert (wrong.status_code, wrong.param) == (400, "priority")


async def test_what_a_backend_refuses_as_too_much_is_429_with_the_rate_of_the_queue() -> None:
    async with open_site(most_requests=1, most_waiting=4) as site:
        site.backend.refusal = BusyError("busy by script")
        busy = await refused(site, complete())
        assert (busy.status_code, busy.response.headers["retry-after"]) == (429, "1")


async def test_a_drain_lets_running_requests_finish_and_refuses_new_ones() -> None:
    async with open_site() as site:
        site.backend.permits = 0
        stream = await site.post("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 4})
        await site.until(lambda: len(site.backend.inside) == 1)
        site.stop.set()
        await site.until(lambda: site.condition.state == "draining")
        late = await refused(site, complete())
        assert (late.status_code, late.code, late.response.headers["retry-after"]) == (503, "draining", "1")
        async with await site.connect() as probe:
            await probe.send_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            health = await receive_until(probe, b"}")
            assert b" 503 " in health.splitlines()[0]
            assert b'"state":"draining"' in health
        assert not site.ended.is_set()
        idle = await site.connect()  # must not hold the drain
        site.backend.permit(4)
        data = await receive_all(stream)
        assert b" 200 " in data.splitlines()[0]
        assert TEXT[:4].encode() in data
        await site.until(site.ended.is_set)
        await stream.aclose()
        await idle.aclose()


@pytest.mark.parametrize("stream_mode", [False, True])
async def test_the_drain_deadline_cuts_off_with_an_answer(stream_mode: bool) -> None:
    async with open_site(drain=0.5) as site:
        site.backend.permits = 2
        stream = await site.post("/v1/completions", {"model": "tiny", "prompt": "x", "stream": stream_mode})
        await site.until(lambda: site.backend.stated == 2)
        site.stop.set()
        data = await receive_all(stream)
        assert b"the node was stopped before the answer was complete" in data
        assert (b" 200 " if stream_mode else b" 503 ") in data.splitlines()[0]
        await site.until(site.ended.is_set)
        await stream.aclose()


async def test_health_and_metrics_are_there_to_be_read() -> None:
    async with open_site() as site:
        await with_client(site, complete(max_tokens=9))
        await refused(site, complete(model="gpt"))
        async with await site.connect() as stream:
            await stream.send_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = await receive_until(stream, b"}")
            assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"state": "ready", "role": "router", "name": "here"}
            await stream.send_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            head, _, body = (await receive_all(stream)).partition(b"\r\n\r\n")
            assert b"text/plain" in head
            assert b"asyncfabric_router_request_seconds_bucket" in body
        found = samples(site)
        assert found["asyncfabric_router_requests_total completions 200"] == 1
        assert found["asyncfabric_router_requests_total completions 404"] == 1
        assert found["asyncfabric_router_tokens_total prompt"] == 5
        assert found["asyncfabric_router_tokens_total answer"] == 9
        assert found["asyncfabric_router_first_token_seconds_count"] == 1
        assert found["asyncfabric_router_inside_requests"] == 0
