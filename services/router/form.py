"""The JSON that clients of the OpenAI API read: whole answers, pieces of a stream, the list of models. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncfabric_services.router.ask import Ask
from asyncfabric_services.router.backend import ServedModel
from asyncfabric_services.router.fault import ApiFault

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Form:
    """Writes the answer to one request.

    Attributes:
        ask: the request.
        created: Unix time.
    """

    ask: Ask
    created: int

    def whole(self, text: str, finish: str, tokens: int) -> dict[str, Any]:
        """Return an answer that is not streamed."""
        if self.ask.chat:
            message = {"role": "assistant", "content": text, "refusal": None}
            choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        else:
            choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        return self._head(piece=False) | {"choices": [choice], "usage": self._usage(tokens)}

    def piece(self, text: str, finish: str | None = None, *, first: bool = False) -> dict[str, Any]:
        """Return one piece of a stream; the first of a chat carries the role."""
        if self.ask.chat:
            role = {"role": "assistant"} if first else {}
            delta = role | ({"content": text} if text or first else {})
            choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        else:
            choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        return self._head(piece=True) | {"choices": [choice]} | ({"usage": None} if self.ask.usage_at_end else {})

    def usage(self, tokens: int) -> dict[str, Any]:
        """Return the last piece of a stream whose client asked for counts."""
        return self._head(piece=True) | {"choices": [], "usage": self._usage(tokens)}

    def _head(self, *, piece: bool) -> dict[str, Any]:
        request = self.ask.request
        name = ("chat.completion.chunk" if piece else "chat.completion") if self.ask.chat else "text_completion"
        prefix = "chatcmpl" if self.ask.chat else "cmpl"
        return {"id": f"{prefix}-{request.id}", "object": name, "created": self.created, "model": request.model}

    def _usage(self, tokens: int) -> dict[str, int]:
        prompt = len(self.ask.request.prompt)
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def event(plain: dict[str, Any]) -> bytes:
    """Return one server-sent event (WHATWG HTML, "Server-sent events")."""
    return f"data: {json.dumps(plain, separators=(',', ':'))}\n\n".encode()


def fault_event(fault: ApiFault) -> bytes:
    """Return the event of an error after the status was sent; OpenAI clients raise on it."""
    return event(fault.plain())


def model_list(cards: Sequence[ServedModel]) -> dict[str, Any]:
    """Return the body of `/v1/models`."""
    return {"object": "list", "data": [model_form(card) for card in cards]}


def model_form(card: ServedModel) -> dict[str, Any]:
    """Return the body of `/v1/models/{model}`."""
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "asyncfabric",
        "max_model_len": card.max_tokens,
    }
