"""How connections to the router end, and go on: asked and closed, kept for the next request, or broken by strangers."""

from __future__ import annotations

import json
import os
from contextlib import AsyncExitStack

import pytest
import trio
import trio.testing

pytest.importorskip("hypercorn", reason="the router needs hypercorn")

from scripted_backend import ANSWER, open_site, receive_all, receive_until

from asyncfabric_services.router import connections
from asyncfabric_services.router.server import KEPT_SECONDS

pytestmark = [pytest.mark.trio, pytest.mark.slow]
CLIENTS_SECONDS = 5.0  # that httpx, and so the client of openai, keeps a connection without a request
ASK = {"model": "tiny", "prompt": "x", "max_tokens": 9}
WEBSOCKET = (
    b"GET /health HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
)
UPGRADE = b"GET /health HTTP/1.1\r\nhost: x\r\nupgrade: h2c\r\nconnection: upgrade\r\nhttp2-settings: AAMAAABk\r\n\r\n"
HTTP_2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000 04 00 00000000")  # and empty settings


def http_2_get(path: bytes) -> bytes:
    """Return the beginning of a connection that asks for `path` (RFC 9113 6.2, RFC 7541 appendix A)."""
    block = b"\x82\x86" + bytes([0x04, len(path)]) + path + b"\x01\x01x"
    return HTTP_2 + len(block).to_bytes(3) + b"\x01\x05" + (1).to_bytes(4) + block


@pytest.mark.parametrize("stream_mode", [False, True])
async def test_who_asks_for_it_gets_a_closed_connection_after_the_answer(stream_mode: bool) -> None:
    async with (
        open_site() as site,
        await site.post("/v1/completions", ASK | {"stream": stream_mode}, "connection: close") as stream,
    ):
        reported = await receive_all(stream)
        assert b"[DONE]" in reported if stream_mode else ANSWER[:9] in reported


@pytest.mark.parametrize("stream_mode", [False, True])
async def test_the_old_version_of_http_knows_an_answer_by_its_end(stream_mode: bool) -> None:
    """As proxies speak it: an answer of unknown length ends where the connection ends."""
    async with open_site() as site, await site.connect() as stream:
        body = json.dumps(ASK | {"stream": stream_mode}).encode()
        await stream.send_all(
            b"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            + body
        )
        reported = await receive_all(stream)
        assert reported.endswith(b"data: [DONE]\n\n") if stream_mode else ANSWER[:9] in reported


async def test_bytes_behind_the_last_request_of_a_connection_do_not_cut_its_answer() -> None:
    async with open_site() as site:
        site.backend.permits = 1
        async with await site.post("/v1/completions", ASK | {"stream": True}, "connection: close") as stream:
            reported = await receive_until(stream, b"data: ")
            await stream.send_all(b"\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            await trio.testing.wait_all_tasks_blocked(0.01)
            site.backend.permit(20)
            assert (reported + await receive_all(stream)).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_connection_that_is_kept_answers_again() -> None:
    async with open_site() as site, await site.post("/v1/completions", ASK | {"stream": True}) as stream:
        body = json.dumps(ASK).encode()
        await receive_until(stream, b"\r\n0\r\n\r\n")
        await stream.send_all(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % len(body)
            + body
        )
        assert ANSWER[:9] in await receive_until(stream, b"}}")


@pytest.mark.parametrize(
    "sent",
    [
        http_2_get(b"/\xff"),
        WEBSOCKET + b"\x81\x85\x00\x00\x00\x00hello",
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + b"\x00" * 100,  # TLS
    ],
    ids=["http 2 path", "websocket bytes", "tls"],
)
async def test_what_strangers_send_ends_their_connection_and_no_other(sent: bytes) -> None:
    async with open_site() as site:
        site.backend.permits = 3
        async with await site.post("/v1/completions", ASK | {"stream": True}) as stream:
            await receive_until(stream, b"data: ")
            for _ in range(3):
                async with await site.connect() as stranger:
                    await stranger.send_all(sent)
                    with trio.fail_after(10):
                        while await receive_some(stranger):
                            pass
            site.backend.permit(9)
            assert b"[DONE]" in await receive_until(stream, b"\r\n0\r\n\r\n")


@pytest.mark.parametrize("sent", [http_2_get(b"/health"), UPGRADE], ids=["at once", "upgrade"])
async def test_another_version_of_http_is_refused_by_name(sent: bytes) -> None:
    """Its streams have windows of their own: the kernel would not cut off who takes no bytes of one."""
    async with open_site() as site, await site.connect() as stream:
        await stream.send_all(sent)
        await receive_until(stream, b"http_version_not_supported")
        await receive_all(stream)  # its streams may be open, or their windows closed: the connection ends all the same


@pytest.mark.parametrize("rest", [b"", http_2_get(b"/health")[len(HTTP_2) :][:9]], ids=["nothing", "half a frame"])
async def test_a_connection_of_another_version_ends_although_nothing_is_asked(rest: bytes) -> None:
    async with open_site() as site, await site.connect() as stream:
        await stream.send_all(HTTP_2 + rest)
        await receive_all(stream)


async def test_a_connection_is_kept_for_longer_than_clients_keep_theirs() -> None:
    """Where both ends give it up at the same time, a request now and then meets its end."""
    request = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    async with open_site() as site, await site.connect() as stream:
        for pause in (CLIENTS_SECONDS + 0.5, 0):
            await stream.send_all(request)
            assert b" 200 " in await receive_until(stream, b"}")
            await trio.sleep(pause)


async def test_silent_connections_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_descriptors", lambda: 16)  # half of them are for connections
    async with open_site() as site, AsyncExitStack() as held:
        site.backend.permits = 0
        busy = await held.enter_async_context(await site.post("/v1/completions", ASK | {"stream": True}))
        await site.until(lambda: len(site.backend.inside) == 1)
        mute = [await held.enter_async_context(await site.connect()) for _ in range(7)]
        for number in range(3):
            async with await site.connect() as stream:
                await stream.send_all(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                assert b" 200 " in await receive_all(stream)
            with trio.fail_after(KEPT_SECONDS / 2):
                assert await receive_some(mute[number]) == b"", "the one that was silent for longest ends"
            mute.append(await held.enter_async_context(await site.connect()))
        site.backend.permit(20)
        assert b"[DONE]" in await receive_until(busy, b"\r\n0\r\n\r\n")


async def test_where_all_are_asking_one_more_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_descriptors", lambda: 4)
    async with open_site() as site, AsyncExitStack() as held:
        site.backend.permits = 0
        busy = [await held.enter_async_context(await site.post("/v1/completions", ASK)) for _ in range(2)]
        await site.until(lambda: len(site.backend.inside) == 2)
        async with await site.connect() as stream:
            assert await receive_some(stream) == b""
        site.backend.permit(20)
        for stream in busy:
            assert ANSWER[:9] in await receive_until(stream, b"}}")


@pytest.mark.parametrize("rest", [b"", b"\r\n", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"])
async def test_who_sent_more_than_a_request_and_left_is_missed(rest: bytes) -> None:
    async with open_site() as site:
        site.backend.permits = 0
        body = json.dumps(ASK).encode()
        async with await site.connect() as stream:
            await stream.send_all(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n" % len(body) + body + rest
            )
            await site.until(lambda: len(site.backend.inside) == 1)
        await site.until(lambda: len(site.backend.left) == 1)


@pytest.mark.parametrize("body", [b"content-length: 70\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n49\r\n{"])
@pytest.mark.parametrize("half", [False, True], ids=["closes", "sends no more"])
async def test_who_leaves_before_the_request_is_whole_leaves_nothing(body: bytes, half: bool) -> None:
    async with open_site() as site:
        open_before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):  # the end may be there before the beginning was read
            async with await site.connect() as stream:
                await stream.send_all(
                    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" + body
                )
                if half:
                    await stream.send_eof()
                    await receive_all(stream)
        await site.until(lambda: len(os.listdir("/proc/self/fd")) <= open_before)


async def test_requests_that_were_sent_together_are_answered_in_order() -> None:
    async with open_site() as site, await site.connect() as stream:
        asks = [json.dumps(ASK | {"max_tokens": count}).encode() for count in (3, 5)]
        for body in asks:
            await stream.send_all(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n" % len(body) + body
            )
        reported = await receive_until(stream, b'"completion_tokens":5')
        assert reported.index(b'"completion_tokens":3') < reported.index(b'"completion_tokens":5')


async def receive_some(stream: trio.SocketStream) -> bytes:
    """Return what came, nothing when the server closed or reset the connection."""
    try:
        return await stream.receive_some()
    except trio.BrokenResourceError:
        return b""
