"""What router, decode and prefill nodes send to each other about requests. Pure values; how they travel is not here.

Router and decode node speak through actors; what a prefill node has to compute travels as the body of a KvOffer.
"""

from __future__ import annotations

import msgspec

from asyncfabric.actors import Message, Reference
from asyncfabric.kv import KvLayout
from asyncfabric.unreadable import UNREADABLE
from asyncfabric_services.runner.sampling import Sampling

DECODER = "decoder"
"""Name of the actor of a decode node."""

LAYOUT_LABEL = "layout"
"""Label of a prefill node in the directory: its KvLayout as JSON."""

FIELDS_LABEL = "fields"
"""Label of a decode node whose engine takes fields of requests that the router does not know; its value is "any"."""


ENGINE_LABEL = "engine"
"""Label of a node whose engine is not the reference runner: `vllm`. Prefill and decode of one answer have the same."""

PREFIX_LABEL = "prefix"
"""Label of a node that keeps keys and values of prompts it computed: tokens of a block, the least that it finds."""

PREFILLER = "prefiller"
"""Name of the actor of a prefill node whose engine is asked by messages."""


class PrefillSource(msgspec.Struct, frozen=True):
    """A prefill node that may be asked.

    Attributes:
        name: for people.
        address: its FabricAddress as bytes; empty where engines connect by themselves.
        layout: how pages lie there; None where engines compare theirs by themselves.
        link: address of its link.
    """

    name: str
    address: bytes
    layout: KvLayout | None
    link: str = ""


class Tokens(Message[None]):
    """Tokens of an answer, reported to whom the request named, in order.

    Attributes:
        attempt: of the request; what an earlier attempt still sends is dropped.
        tokens: those after the ones that were reported before.
    """

    attempt: str
    tokens: list[int]


class Generate(Message[int]):
    """Generate an answer; answered with the number of tokens that were reported, once all of them were.

    Attributes:
        attempt: unique, carried in each `Tokens`.
        prompt: token ids, with those of the answer that an earlier attempt gave.
        max_tokens: how many more at most.
        answered: tokens at the end of `prompt` that belong to the answer.
        sampling: how tokens are chosen.
        remaining_s: time left.
        sources: prefill nodes, the one to ask first in front.
        reply: the actor that receives the tokens.
        trace: W3C trace context, or empty; see asyncfabric.observe.spans.TraceContext.
        fields: of the client's body, for the engine, as a JSON object; empty where there are none.
    """

    attempt: str
    prompt: list[int]
    max_tokens: int
    answered: int
    sampling: Sampling
    remaining_s: float
    sources: list[PrefillSource]
    reply: Reference
    trace: str = ""
    fields: bytes = b""


class Prefill(Message[bytes]):
    """Compute a prompt and keep its blocks; answered with what the engine that decodes needs, as a JSON object.

    Attributes:
        attempt: as in `Generate`.
        prompt: token ids.
        trace: W3C trace context, or empty; see asyncfabric.observe.spans.TraceContext.
    """

    attempt: str
    prompt: list[int]
    trace: str = ""


def refuse_fields(request: Generate) -> None:
    """Raise ValueError for a request with fields for an engine; for nodes whose engine has none of its own."""
    if request.fields:
        try:
            fields = msgspec.json.decode(request.fields, type=dict[str, msgspec.Raw])
        except UNREADABLE as error:
            raise ValueError(f"the request has fields that cannot be read: {error}") from None
        names = ", ".join(map(repr, fields))
        raise ValueError(f"the engine of this decode node does not know the fields {names[:200]}")


_prompts = msgspec.msgpack.Decoder(list[int])


def encode_prompt(prompt: list[int]) -> bytes:
    """Return the body of an offer: what the source has to compute."""
    return msgspec.msgpack.encode(prompt)


def decode_prompt(body: bytes, tokens: int, vocabulary: int) -> list[int]:
    """Return the prompt of an offer's body; raises ValueError when it is not `tokens` ids below `vocabulary`."""
    try:
        prompt = _prompts.decode(body)
    except UNREADABLE as error:
        raise ValueError(f"the offer has no prompt that can be read: {error}") from None
    if len(prompt) != tokens or not all(0 <= token < vocabulary for token in prompt):
        raise ValueError(f"expected {tokens} token ids below {vocabulary}, got {len(prompt)} of them")
    return prompt
