"""What the parent, the prefill and the decode process say to each other.

Parent and children talk in JSON lines over the children's stdin and stdout. Decode and prefill talk in small fabric
messages; one that exceeds a message is cut into fragments, which may arrive in any order.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from asyncfabric_services.demo.settings import Job, Settings

FRAGMENT_BYTES = 4096  # below the payload limit of one fabric message, with room for the envelope


# Parent to child.


class Start(msgspec.Struct, tag=True, frozen=True):
    """First line: how to run."""

    settings: Settings


class Meet(msgspec.Struct, tag=True, frozen=True):
    """The fabric address of the other child: the one peer to accept."""

    address: bytes


class Finish(msgspec.Struct, tag=True, frozen=True):
    """Close the fabric and leave."""


# Child to parent.


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The child is ready."""

    address: bytes
    rails: list[str]
    model: str
    pool_pages: int
    page_bytes: int


class Progress(msgspec.Struct, tag=True, frozen=True):
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
    pushes: list[tuple[int, int]]  # (submitted, completed) of each transfer


class Answer(msgspec.Struct, tag=True, frozen=True):
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


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The last word of a child that cannot go on; `status` is the exit status it stands for."""

    reason: str
    status: int


class Goodbye(msgspec.Struct, tag=True, frozen=True):
    """The child has closed its fabric."""

    leaked_pages: int


ToChild = Start | Meet | Job | Finish
ToParent = Hello | Progress | Pushed | Answer | Failed | Goodbye


# Decode to prefill and back, through the fabric.


class Lease(msgspec.Struct, tag=True, frozen=True):
    """Decode leased pages and a context slot; prefill may write to exactly these, naming `imm`."""

    id: int
    prompt: list[int]
    pages: list[int]
    pool_pages: int
    pages_key: bytes
    context_key: bytes
    imm: int
    layout: bytes  # JSON of KvLayout
    layout_digest: str
    deadline: float


class Refusal(msgspec.Struct, tag=True, frozen=True):
    """Prefill will write nothing for this lease."""

    id: int
    reason: str


class Fragment(msgspec.Struct, array_like=True, frozen=True):
    """Part `index` of `count` of an encoded Lease or Refusal."""

    id: int
    index: int
    count: int
    data: bytes


def fragments(message: Lease | Refusal) -> Iterator[bytes]:
    """Cut a message into payloads that fit one fabric message each."""
    data = msgspec.msgpack.encode(message)
    count = max(1, -(-len(data) // FRAGMENT_BYTES))
    for index in range(count):
        part = data[index * FRAGMENT_BYTES : (index + 1) * FRAGMENT_BYTES]
        yield msgspec.msgpack.encode(Fragment(message.id, index, count, part))


class Assembler:
    """Puts fragments together again, in whatever order they came."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._parts: dict[int, dict[int, bytes]] = {}

    def add(self, payload: bytes) -> Lease | Refusal | None:
        """Take one payload; return the message if that was its last missing part. Junk raises msgspec.DecodeError."""
        part = msgspec.msgpack.decode(payload, type=Fragment)
        parts = self._parts.setdefault(part.id, {})
        parts[part.index] = part.data
        if len(parts) < part.count:
            return None
        del self._parts[part.id]
        data = b"".join(parts[index] for index in sorted(parts))
        return msgspec.msgpack.decode(data, type=Lease | Refusal)
