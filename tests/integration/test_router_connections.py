"""How connections to the router end, and go on: once asked and closed, kept for the next request."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("hypercorn", reason="the router needs hypercorn")

from scripted_backend import ANSWER, open_site, receive_all, receive_until

pytestmark = [pytest.mark.trio, pytest.mark.slow]
ASK = {"model": "tiny", "prompt": "x", "max_tokens": 9}


@pytest.mark.parametrize("stream_mode", [False, True])
async def test_who_asks_for_it_gets_a_closed_connection_after_the_answer(stream_mode: bool) -> None:
    async with (
        open_site() as site,
        await site.post("/v1/completions", ASK | {"stream": stream_mode}, "connection: close") as stream,
    ):
        told = await receive_all(stream)
        assert b"[DONE]" in told if stream_mode else ANSWER[:9] in told


@pytest.mark.parametrize("stream_mode", [False, True])
async def test_the_old_version_of_http_knows_an_answer_by_its_end(stream_mode: bool) -> None:
    """As proxies speak it: an answer of unknown length ends where the connection ends."""
    async with open_site() as site, await site.connect() as stream:
        body = json.dumps(ASK | {"stream": stream_mode}).encode()
        await stream.send_all(b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        told = await receive_all(stream)
        assert told.endswith(b"data: [DONE]\n\n") if stream_mode else ANSWER[:9] in told


async def test_a_connection_that_is_kept_answers_again() -> None:
    async with open_site() as site, await site.post("/v1/completions", ASK | {"stream": True}) as stream:
        body = json.dumps(ASK).encode()
        await receive_until(stream, b"\r\n0\r\n\r\n")
        await stream.send_all(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        assert ANSWER[:9] in await receive_until(stream, b"}}")
