"""Messages between the parent and its two children. Decode and prefill speak the protocol of `asyncfabric.kv`.

Pure values; how they travel is services/children. A prompt travels from decode to prefill as the body of an offer.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from asyncfabric.kv import KvLayout, StreamWrite
from asyncfabric_services.demo.settings import DemoSettings, Job

# Parent to child.


class Start(msgspec.Struct, tag=True, frozen=True):
    """First line: how to run, and the secret of both fabrics. It travels through a pipe that only the child reads."""

    settings: DemoSettings
    secret: bytes

    def __repr__(self) -> str:
        """Return a text without the secret."""
        return f"Start({self.settings!r})"


class Meet(msgspec.Struct, tag=True, frozen=True):
    """The fabric address of the other child, the one peer to accept, and how its pages lie."""

    address: bytes
    layout: KvLayout


class Finish(msgspec.Struct, tag=True, frozen=True):
    """Close the fabric and leave."""


# Child to parent.


class PairHello(msgspec.Struct, tag=True, frozen=True):
    """The child is ready."""

    address: bytes
    rails: list[str]
    model: str
    pool_pages: int
    layout: KvLayout


class PairProgress(msgspec.Struct, tag=True, frozen=True):
    """How far a stage of a job is: pages (arrivals), decode or reference (tokens)."""

    id: int
    stage: str
    done: int
    total: int


class Pushed(msgspec.Struct, tag=True, frozen=True):
    """What prefill did for one job. Times are nanoseconds of the monotonic clock, which processes of one host share."""

    id: int
    bytes: int
    pages: int
    compute_start_ns: int
    compute_end_ns: int
    writes: tuple[StreamWrite, ...]


class PairAnswer(msgspec.Struct, tag=True, frozen=True):
    """What decode found for one job. Times as in Pushed; durations are seconds."""

    id: int
    prompt_tokens: int
    arrivals: int
    last_arrival_ns: int
    ttft_streamed: float
    ttft_one_process: float
    step_seconds: float
    text: str
    differences: list[str]


class PairFailed(msgspec.Struct, tag=True, frozen=True):
    """The last message of a child that cannot go on; `status` is the exit status it stands for."""

    reason: str
    status: int


class PairGoodbye(msgspec.Struct, tag=True, frozen=True):
    """The child has closed its fabric."""

    leaked_pages: int


ToChild = Start | Meet | Job | Finish
ToParent = PairHello | PairProgress | Pushed | PairAnswer | PairFailed | PairGoodbye


def encode_prompt(tokens: Sequence[int]) -> bytes:
    """Return token ids as the body of an offer."""
    return msgspec.msgpack.encode(tokens)


def decode_prompt(body: bytes, count: int) -> list[int]:
    """Return the token ids of an offer of `count` tokens; raises ValueError for anything else."""
    try:
        tokens = msgspec.msgpack.decode(body, type=list[int])
    except msgspec.DecodeError as error:
        raise ValueError(f"the body of the offer is no prompt: {error}") from None
    if len(tokens) != count:
        raise ValueError(f"the offer is for {count} tokens, its prompt has {len(tokens)}")
    return tokens
