"""From JSON to a request and from tokens to text: the pure parts of the router."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the router needs starlette")

from asyncfabric.errors import BrokenError, BusyError, ClosedError, PeerError
from asyncfabric_services.router.ask import Ask, Limits, read_ask
from asyncfabric_services.router.backend import ServedModel
from asyncfabric_services.router.fault import ApiFault, fault_of
from asyncfabric_services.router.spoken import Spoken
from asyncfabric_services.runner.tokenizer import ByteTokenizer

CARDS = [ServedModel("tiny", ByteTokenizer(), 100), ServedModel("other", ByteTokenizer(), 50)]
LIMITS = Limits(default_tokens=16, deadline_seconds=60)


def read(body: Any, *, chat: bool = False) -> Ask:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_ask(raw, chat=chat, cards=CARDS, limits=LIMITS, deadline_seconds=5)


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hello"} | fields


def talk(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]} | fields


def test_a_full_request_is_read() -> None:
    ask = read(
        completion(
            max_tokens=7,
            temperature=0,
            top_p=0.5,
            seed=9,
            stop=["a", "bc"],
            stream=True,
            stream_options={"include_usage": True},
            user="me",
            n=1,
            logprobs=None,
        )
    )
    request = ask.request
    assert request.prompt == tuple(b"hello")
    assert (request.max_tokens, request.deadline_seconds) == (7, 5)
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.seed) == (0, 0.5, 9)
    assert (ask.stops, ask.stream, ask.usage_at_end, ask.chat) == (("a", "bc"), True, True, False)


def test_what_is_not_stated_has_the_defaults_of_the_api() -> None:
    first, second = read(completion()), read(completion())
    assert first.request.sampling.temperature == 1
    assert first.request.max_tokens == 16
    assert not first.stream
    assert first.request.id != second.request.id
    assert first.request.sampling.seed != second.request.sampling.seed
    assert read(completion(prompt="x" * 95)).request.max_tokens == 5, "no more than there is room for"


def test_prompts_come_as_text_as_tokens_and_as_a_batch_of_one() -> None:
    for prompt in ("abc", [97, 98, 99], ["abc"], [[97, 98, 99]]):
        assert read(completion(prompt=prompt)).request.prompt == (97, 98, 99)


def test_chats_come_as_text_and_as_parts() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    plain = read(talk(max_completion_tokens=3), chat=True)
    assert bytes(plain.request.prompt).decode() == "user: hi\nassistant: "
    assert plain.request.max_tokens == 3
    assert read(talk(messages=[{"role": "user", "content": parts}]), chat=True).request.prompt == plain.request.prompt


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        (b"{", 400, None, "invalid_json"),
        (b"\xff\xfe", 400, None, "invalid_json"),
        (b"[" * 100_000, 400, None, "invalid_json"),
        ([1], 400, None, "invalid_json"),
        ({"prompt": "x"}, 400, "model", "missing_required_parameter"),
        ({"model": 5, "prompt": "x"}, 400, "model", "invalid_type"),
        (completion(model="gpt"), 404, "model", "model_not_found"),
        ({"model": "tiny"}, 400, "prompt", "missing_required_parameter"),
        (completion(prompt=""), 400, "prompt", "invalid_value"),
        (completion(prompt=5), 400, "prompt", "invalid_type"),
        (completion(prompt=["a", "b"]), 400, "prompt", "invalid_type"),
        (completion(prompt=[1, True]), 400, "prompt", "invalid_type"),
        (completion(prompt=[1, 256]), 400, "prompt", "invalid_value"),
        (completion(prompt=[-1]), 400, "prompt", "invalid_value"),
        (completion(prompt="\ud800"), 400, "prompt", "invalid_value"),
        (completion(prompt="x" * 100), 400, "prompt", "context_length_exceeded"),
        (completion(max_tokens=96), 400, "max_tokens", "context_length_exceeded"),
        (completion(max_tokens=0), 400, "max_tokens", "invalid_value"),
        (completion(max_tokens="7"), 400, "max_tokens", "invalid_type"),
        (completion(max_tokens=True), 400, "max_tokens", "invalid_type"),
        (completion(temperature=2.1), 400, "temperature", "invalid_value"),
        (completion(temperature=[]), 400, "temperature", "invalid_type"),
        (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', 400, "temperature", "invalid_value"),
        (completion(top_p=0), 400, "top_p", "invalid_value"),
        (completion(stream="yes"), 400, "stream", "invalid_type"),
        (completion(stop=[""]), 400, "stop", "invalid_type"),
        (completion(stop=["a"] * 5), 400, "stop", "invalid_value"),
        (completion(stop="a" * 1001), 400, "stop", "invalid_value"),
        (completion(stream_options={}), 400, "stream_options", "invalid_value"),
        (completion(seed=1.5), 400, "seed", "invalid_type"),
        (completion(n=2), 400, "n", "unsupported_parameter"),
        (completion(logprobs=5), 400, "logprobs", "unsupported_parameter"),
        (completion(logprobs=0), 400, "logprobs", "unsupported_parameter"),  # asks for those of the chosen tokens
        (completion(echo=True), 400, "echo", "unsupported_parameter"),
        (completion(tempreture=0), 400, "tempreture", "unknown_parameter"),
        (completion(messages=[]), 400, "messages", "unknown_parameter"),
    ],
)
def test_bad_requests_are_reported_by_field(body: Any, status: int, param: str | None, code: str) -> None:
    with pytest.raises(ApiFault) as caught:
        read(body)
    fault = caught.value
    assert (fault.status, fault.param, fault.code) == (status, param, code)
    assert fault.plain()["error"]["type"] == "invalid_request_error"
    assert param is None or param in str(fault) or status == 404 or code == "context_length_exceeded"


def test_fields_of_an_engine_are_passed_where_the_card_reports_it() -> None:
    """Those that change the form of the answer, and those of the other endpoint, stay refused by name."""
    cards = [replace(CARDS[0], passes_fields=True)]

    def passed(body: dict[str, Any], *, chat: bool = False) -> dict[str, Any]:
        raw = json.dumps(body).encode()
        return dict(read_ask(raw, chat=chat, cards=cards, limits=LIMITS, deadline_seconds=5).request.fields)

    own = {"top_k": 5, "guided_json": {"type": "object"}, "presence_penalty": 0.5}
    assert passed(completion(**own, user="me", seed=None, min_p=None)) == own
    assert passed(talk(**own), chat=True) == own
    assert passed(completion()) == {}
    for body, chat, param in (
        (completion(n=2, **own), False, "n"),
        (completion(messages=[], **own), False, "messages"),
        (talk(prompt="x", **own), True, "prompt"),
        (completion(temperature=3), False, "temperature"),
    ):
        with pytest.raises(ApiFault) as caught:
            passed(body, chat=chat)
        assert caught.value.param == param
    with pytest.raises(ApiFault, match="top_k: unknown field"):
        read(completion(**own))


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([{"content": "x"}], "messages[0]"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "\ud800", "content": "x"}], "messages[0]"),
    ],
)
def test_bad_chats_are_reported_by_message(messages: Any, param: str) -> None:
    with pytest.raises(ApiFault) as caught:
        read(talk(messages=messages), chat=True)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "body",
    [
        completion(**{"\ud800": 1}),
        completion(**{"x" * 1_000_000: 1}),
        completion(model="x" * 1_000_000),
        completion(prompt=[10**4000]),
        completion(temperature=10**4000),
    ],
    ids=["half a pair", "field", "model", "token", "number"],
)
def test_what_a_request_stated_is_quoted_so_that_it_can_be_sent(body: Any) -> None:
    with pytest.raises(ApiFault) as caught:
        read(body)
    assert len(json.dumps(caught.value.plain(), ensure_ascii=False).encode()) < 3000


class Tokenless(ByteTokenizer):
    """No token stands for more than 3 characters, and none is ever made."""

    longest = 3

    def encode(self, text: str) -> list[int]:
        raise AssertionError(f"tokens were made of {len(text)} characters")


@pytest.mark.parametrize(
    ("body", "param", "found"),
    [
        (completion(prompt="x" * 28), "prompt", "has 28 characters, and at most 27 can fit, as no token"),
        (completion(prompt=["x" * 28]), "prompt", "has 28 characters"),
        (completion(prompt=[1] * 10), "prompt", "has 10 token ids"),
        (talk(messages=[{"role": "user", "content": "x" * 24}]), "messages", "has 28 characters"),
        (talk(messages=[{"role": "user", "content": "x" * 10}] * 2), "messages", "has 28 characters"),
        (talk(messages=[{"role": "", "content": ""}] * 10), "messages", "has 10 messages"),
    ],
)
def test_no_tokens_are_made_of_a_prompt_that_cannot_fit(body: dict[str, Any], param: str, found: str) -> None:
    cards = [ServedModel("tiny", Tokenless(), 10)]
    with pytest.raises(ApiFault, match=found) as caught:
        read_ask(json.dumps(body).encode(), chat="messages" in body, cards=cards, limits=LIMITS, deadline_seconds=1)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, "context_length_exceeded")


def test_a_prompt_that_may_fit_is_counted_in_tokens() -> None:
    with pytest.raises(AssertionError, match="of 27 characters"):
        read_ask(
            json.dumps(completion(prompt="x" * 27)).encode(),
            chat=False,
            cards=[ServedModel("tiny", Tokenless(), 10)],
            limits=LIMITS,
            deadline_seconds=1,
        )


def test_a_template_that_refuses_is_the_requests_fault() -> None:
    class Refusing(ByteTokenizer):
        def encode_chat(self, chat: Any) -> list[int]:
            raise RuntimeError("roles must alternate")

    with pytest.raises(ApiFault, match="roles must alternate") as caught:
        read_ask(
            json.dumps(talk()).encode(),
            chat=True,
            cards=[ServedModel("tiny", Refusing(), 100)],
            limits=LIMITS,
            deadline_seconds=1,
        )
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (BusyError("full"), 429, True),
        (ClosedError("bye"), 503, True),
        (PeerError("dead"), 502, False),
        (BrokenError("broken"), 502, False),
        (ValueError("never"), 400, False),
        (ExceptionGroup("one", [BusyError("full")]), 429, True),
        (ApiFault(418, "teapot"), 418, False),
    ],
)
def test_each_error_of_a_backend_has_its_status(error: Exception, status: int, retry: bool) -> None:
    fault = fault_of(error)
    assert fault is not None
    assert fault.status == status
    assert ("retry-after" in fault.headers()) == retry


def test_an_error_that_nobody_foresaw_is_none_of_these() -> None:
    assert fault_of(RuntimeError("bug")) is None
    assert fault_of(ExceptionGroup("two", [BusyError("a"), RuntimeError("bug")])) is None


def speak(text: str, *stops: str) -> tuple[list[str], bool]:
    spoken = Spoken(ByteTokenizer(), stops)
    parts = []
    for token in text.encode():
        parts.append(spoken.feed(token))
        if spoken.stopped:
            break
    return [*parts, spoken.finish()], spoken.stopped


@pytest.mark.parametrize(
    ("text", "stops", "stated", "stopped"),
    [
        ("hello world", ("wor",), "hello ", True),
        ("hello world", ("worx",), "hello world", False),
        ("aaab", ("aab",), "a", True),
        ("abcabd", ("abd", "cab"), "ab", True),
        ("abc", ("bc", "abc"), "", True),
        ("ab", ("abc",), "ab", False),
        ("x€y", ("€",), "x", True),
    ],
)
def test_stop_strings_end_the_text_before_them(text: str, stops: tuple[str, ...], stated: str, stopped: bool) -> None:
    parts, found = speak(text, *stops)
    assert ("".join(parts), found) == (stated, stopped)


def test_no_part_of_a_stop_string_is_ever_stated() -> None:
    draws = random.Random(7)
    for _ in range(500):
        text = "".join(draws.choices("ab", k=draws.randint(0, 12)))
        stops = tuple("".join(draws.choices("ab", k=draws.randint(1, 4))) for _ in range(draws.randint(1, 3)))
        parts, stopped = speak(text, *stops)
        # The first moment at which a stop string is complete decides; of those complete then, the earliest beginning.
        end = next((end for end in range(len(text) + 1) if any(stop in text[:end] for stop in stops)), None)
        expected = text if end is None else text[: min(p for p in (text[:end].find(s) for s in stops) if p >= 0)]
        assert ("".join(parts), stopped) == (expected, end is not None)
