"""From the JSON body of `/v1/completions` and `/v1/chat/completions` to what a backend is asked. Pure."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncfabric.unreadable import UNREADABLE
from asyncfabric_services.router import field
from asyncfabric_services.router.backend import GenerateRequest, ServedModel
from asyncfabric_services.router.fault import ApiFault
from asyncfabric_services.router.length import refuse_count, refuse_text, too_long
from asyncfabric_services.runner.sampling import Sampling

MOST_STOPS, MOST_STOP_CHARACTERS = 4, 1000
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
CHAT, TEXT = ("messages", "max_completion_tokens"), ("prompt",)
SHARED = ("model", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "stream_options", "priority")
PRIORITIES = 100
NEUTRAL_OF_ANSWERS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
}
"""Fields of the API that ask for another form of answer than the router makes, with the values that ask for nothing."""

NEUTRAL_OF_TOKENS: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "response_format": ({"type": "text"},),
}
"""Fields that change which tokens are chosen: an engine may have them, the runner here has not."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the router allows.

    Attributes:
        default_tokens: length of an answer where the request has none.
        deadline_seconds: of a request that has none, and the longest that one may have.
    """

    default_tokens: int
    deadline_seconds: float


@dataclass(frozen=True, slots=True)
class Ask:
    """One request as its client meant it.

    Attributes:
        request: for the backend.
        card: the model.
        chat: whether the answer is a message or a text.
        stream: whether it is sent piece by piece.
        usage_at_end: whether a stream ends with the counts of tokens.
        stops: strings that end the answer.
        priority: of its turn, when requests wait; the lower, the earlier.
    """

    request: GenerateRequest
    card: ServedModel
    chat: bool
    stream: bool
    usage_at_end: bool
    stops: tuple[str, ...]
    priority: int = 0


def read_ask(raw: bytes, *, chat: bool, cards: Sequence[ServedModel], limits: Limits, deadline_seconds: float) -> Ask:
    """Read a body; raises ApiFault with the status, the field and the reason."""
    body = _object(raw)
    own, other = (CHAT, TEXT) if chat else (TEXT, CHAT)
    card = _card(field.string(body, "model"), cards)
    known = (*SHARED, *own, *IGNORED, *NEUTRAL_OF_ANSWERS)
    field.refuse_unsupported(body, NEUTRAL_OF_ANSWERS)
    passed: dict[str, Any] = {}
    if card.passes_fields:
        field.refuse_unknown({name: body[name] for name in other if name in body}, known)
        passed = {name: value for name, value in body.items() if name not in known and value is not None}
        _refuse_unsendable(passed)
    else:
        field.refuse_unknown(body, (*known, *NEUTRAL_OF_TOKENS))
        field.refuse_unsupported(body, NEUTRAL_OF_TOKENS)
    prompt = _chat_prompt(body, card) if chat else _text_prompt(body, card)
    room = card.max_tokens - len(prompt)
    if room < 1:
        raise too_long(card, len(prompt), 1, "messages" if chat else "prompt")
    wanted = field.integer(body, "max_completion_tokens", 1, 1 << 31) if chat else None
    wanted = wanted or field.integer(body, "max_tokens", 1, 1 << 31)
    if wanted is not None and wanted > room:
        raise too_long(card, len(prompt), wanted, "max_tokens")
    stream = field.flag(body, "stream")
    options = body.get("stream_options")
    if options is not None and (not isinstance(options, dict) or not stream):
        raise field.wrong("stream_options", "expected an object, and stream to be true", "invalid_value")
    seed = field.integer(body, "seed", -(1 << 63), (1 << 63) - 1)
    return Ask(
        request=GenerateRequest(
            id=secrets.token_hex(12),
            model=card.name,
            prompt=tuple(prompt),
            max_tokens=wanted or min(room, limits.default_tokens),
            sampling=Sampling(
                temperature=field.number(body, "temperature", 0, 2, 1.0),
                top_p=field.number(body, "top_p", 1e-9, 1, 1.0),
                seed=secrets.randbits(63) if seed is None else seed,
            ),
            deadline_seconds=deadline_seconds,
            fields=passed,
        ),
        card=card,
        chat=chat,
        stream=stream,
        usage_at_end=field.flag(options or {}, "include_usage"),
        stops=field.strings(body, "stop", MOST_STOPS, MOST_STOP_CHARACTERS),
        priority=field.integer(body, "priority", -PRIORITIES, PRIORITIES) or 0,
    )


def _refuse_unsendable(fields: Mapping[str, Any]) -> None:
    """Refuse values that the node of the engine cannot be sent: JSON has some that this encoder has not."""
    for name, value in fields.items():
        try:
            msgspec.json.encode({name: value})
        except UNREADABLE as error:
            raise field.wrong(ascii(name)[1:-1], f"the value cannot be passed on: {error}", "invalid_value") from None


def _object(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except UNREADABLE as error:
        raise ApiFault(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiFault(400, f"the body must be a JSON object, got {type(body).__name__}", code="invalid_json")
    return body


def _card(name: str, cards: Sequence[ServedModel]) -> ServedModel:
    for card in cards:
        if card.name == name:
            return card
    there = ", ".join(sorted(card.name for card in cards)) or "none"
    message = f"the model {name!r} does not exist here; there is: {there}"
    raise ApiFault(404, message, param="model", code="model_not_found")


def _text_prompt(body: Mapping[str, Any], card: ServedModel) -> list[int]:
    prompt = body.get("prompt")
    if prompt is None:
        raise field.wrong("prompt", "this field is required", "missing_required_parameter")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str):
        refuse_text(card, len(prompt), "prompt")
        tokens = card.tokenizer.encode(_encodable("prompt", prompt))
    elif isinstance(prompt, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in prompt):
        refuse_count(card, len(prompt), "token ids", "prompt")
        beyond = [one for one in prompt if not 0 <= one < card.tokenizer.vocabulary]
        if beyond:
            most = card.tokenizer.vocabulary - 1
            raise field.wrong("prompt", f"token ids are 0..{most}, got {beyond[0]}", "invalid_value")
        tokens = prompt
    else:
        raise field.wrong("prompt", "expected one string or one list of token ids", "invalid_type")
    if not tokens:
        raise field.wrong("prompt", "expected at least one token, got none", "invalid_value")
    return tokens


def _chat_prompt(body: Mapping[str, Any], card: ServedModel) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise field.wrong("messages", "expected a list of at least one message", "invalid_type")
    refuse_count(card, len(messages), "messages", "messages")
    chat, characters = [], 0
    for index, message in enumerate(messages):
        param = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise field.wrong(param, "expected an object with role and content", "invalid_type")
        text = _content(param, message.get("content"))
        characters += len(message["role"]) + len(text)
        refuse_text(card, characters, "messages")
        chat.append({"role": _encodable(param, message["role"]), "content": _encodable(param, text)})
    try:
        return card.tokenizer.encode_chat(chat)
    except Exception as error:  # templates of checkpoints are programs: they refuse roles and orders by raising
        raise field.wrong("messages", f"the model's chat template refuses them: {error}", "invalid_value") from None


def _content(param: str, content: Any) -> str:
    if isinstance(content, list) and all(_is_text(part) for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise field.wrong(f"{param}.content", "expected a string or a list of text parts", "invalid_type")
    return content


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _encodable(param: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise field.wrong(param, "the text holds half a surrogate pair", "invalid_value") from None
    return text
