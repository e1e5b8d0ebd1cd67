"""From what routers ask to what vLLM takes, and back. Pure: no vLLM here, so that it is tested without.

The result of `sampling_arguments` are keyword arguments of vLLM's SamplingParams.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asyncfabric.unreadable import UNREADABLE
from asyncfabric_services.nodes.messages import Generate

PASSED = (
    "min_p",
    "top_k",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "skip_special_tokens",
)
"""Fields of a request that vLLM's SamplingParams has under the same name."""

KEEP = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""kv_transfer_params of a prompt that another engine goes on with."""

SEEDS = 1 << 63


def sampling_arguments(request: Generate, transfer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams for an answer.

    An answer that goes on after a lost node draws from another seed than its beginning: vLLM cannot skip draws.
    `structured_outputs` is what vLLM's StructuredOutputsParams takes. Raises ValueError for a field that vLLM does
    not have, and for a grammar in the middle of an answer, whose state was lost with its node.
    """
    fields = msgspec.json.decode(request.fields, type=dict[str, Any]) if request.fields else {}
    form = fields.pop("response_format", None)
    given = fields.pop("structured_outputs", None)
    unknown = [name for name in fields if name not in PASSED]
    if unknown:
        raise ValueError(f"vLLM is not given the fields {', '.join(map(repr, unknown))[:200]}; it has {passed_names()}")
    arguments: dict[str, Any] = {
        **fields,
        "temperature": request.sampling.temperature,
        "top_p": request.sampling.top_p,
        "seed": (request.sampling.seed + request.answered) % SEEDS,
        "max_tokens": request.max_tokens,
        "detokenize": False,
        "extra_args": {"kv_transfer_params": dict(transfer)},
    }
    if "logit_bias" in arguments:
        arguments["logit_bias"] = {int(token): float(bias) for token, bias in arguments["logit_bias"].items()}
    structured = _structured(form) if given is None else given
    if structured is not None:
        if request.answered:
            raise ValueError("an answer of a given form cannot go on at another node: ask again")
        arguments["structured_outputs"] = structured
    return arguments


def prefill_arguments() -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams for a prompt that another engine goes on with."""
    return {
        "temperature": 0.0,
        "max_tokens": 1,
        "ignore_eos": True,
        "detokenize": False,
        "extra_args": {"kv_transfer_params": dict(KEEP)},
    }


def streamed_tokens(tokens: Sequence[int], finish: str | None, stopped_by: object) -> list[int]:
    """Return the tokens of one output that belong to the answer: vLLM gives the token that ended it along."""
    ended_by_token = finish == "stop" and not isinstance(stopped_by, str)
    return list(tokens[:-1] if ended_by_token else tokens)


def read_transfer(packed: bytes) -> dict[str, Any]:
    """Return the kv_transfer_params that a prefill node answered with; raises ValueError when they are none."""
    try:
        return msgspec.json.decode(packed, type=dict[str, Any])
    except UNREADABLE as error:
        raise ValueError(f"the answer of the prefill node cannot be read: {error}") from None


def trace_headers(context: str) -> dict[str, str] | None:
    """Return a trace context as vLLM takes it from the headers of a request, None without one."""
    parent, _, state = context.partition(" ")
    return {"traceparent": parent} | ({"tracestate": state} if state else {}) if parent else None


def passed_names() -> str:
    """Return the names of all fields that vLLM is given."""
    return ", ".join((*PASSED, "response_format", "structured_outputs"))


def _structured(form: Any) -> dict[str, Any] | None:
    kind = form.get("type") if isinstance(form, dict) else None
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema" and isinstance(form.get("json_schema"), dict) and "schema" in form["json_schema"]:
        return {"json": json.dumps(form["json_schema"]["schema"])}
    raise ValueError("response_format: expected type text, json_object, or json_schema with its schema")
