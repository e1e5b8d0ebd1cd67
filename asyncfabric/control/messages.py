"""What control frames state, and the one place that turns bytes into messages and back.

Pure: no sockets, no clock, any thread. A frame is `AF`, one byte of schema version, then one MessagePack envelope; the
version stands before the MessagePack, so that a frame of any later schema is recognised and answered as such. Bodies
of the layers above are opaque bytes here. Decoding returns `Undecodable` for hostile bytes, it never raises.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from asyncfabric.unreadable import UNREADABLE

SCHEMA_VERSION: Final = 1
MAGIC: Final = b"AF"
MAX_FRAME_BYTES: Final = 1 << 20
ENVELOPE_BYTES: Final = 2048
"""Room that a frame keeps for everything but the body: names, channel and trace at their longest."""

NODE_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")

_PREFIX = MAGIC + bytes([SCHEMA_VERSION])

Name = Annotated[str, Meta(min_length=1, max_length=128)]
NodeName = Annotated[str, Meta(pattern=rf"\A{NODE_NAME.pattern}\Z")]
"""Of a node or a role: it stands in tables, metrics, logs and paths of others, so nothing in it needs quoting."""
LinkRole = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._-]{0,64}\Z")]
"""What a process is in the cluster; empty for one that is no node of it, such as a command."""
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Room = Annotated[int, Meta(ge=2 * ENVELOPE_BYTES, le=(1 << 63) - 1)]
"""What a peer takes in: less would leave no room for answers, and no configuration states less."""
Text = Annotated[str, Meta(max_length=512)]


class Identity(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Who a process is: the pair, never the name or an address alone.

    Attributes:
        name: what people call the node: 1..64 letters, digits, `.`, `_` and `-`.
        incarnation: grows with each start of a process; wall-clock nanoseconds at the start.
    """

    name: NodeName
    incarnation: Number

    def __str__(self) -> str:
        """Return the form of logs and errors; a name that would begin a line or move a cursor is written out."""
        name = self.name if self.name.isprintable() else ascii(self.name)
        return f"{name}@{self.incarnation:x}"


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """The dialer opens a session: where it listens, what it can, how much it takes before it gives credit, its role."""

    address: Text
    capabilities: Annotated[tuple[Name, ...], Meta(max_length=32)]
    window_bytes: Room
    max_frame_bytes: Room
    role: LinkRole = ""


class Welcome(Struct, frozen=True, array_like=True, tag="welcome"):
    """The answer to Hello, with the same facts about the other side."""

    address: Text
    capabilities: Annotated[tuple[Name, ...], Meta(max_length=32)]
    window_bytes: Room
    max_frame_bytes: Room
    role: LinkRole = ""


class Heartbeat(Struct, frozen=True, array_like=True, tag="heartbeat"):
    """I live."""


class Credit(Struct, frozen=True, array_like=True, tag="credit"):
    """Of this channel, so many units were taken by its listener since the session began."""

    channel: Name
    taken: Number


class Parcel(Struct, frozen=True, array_like=True, tag="parcel"):
    """A message of a layer above, opaque here."""

    channel: Name
    body: bytes


class Drain(Struct, frozen=True, array_like=True, tag="drain"):
    """First phase of leaving: I send no more parcels, what I sent is before this."""


class Drained(Struct, frozen=True, array_like=True, tag="drained"):
    """Answer to Drain: I have all of yours, and I send no more either."""


class Goodbye(Struct, frozen=True, array_like=True, tag="goodbye"):
    """The session is over for me."""

    reason: Text


class SessionRefusal(Struct, frozen=True, array_like=True, tag="refusal"):
    """A frame of yours was not taken; `code` is a reason of `protocol_errors`, `text` is for people."""

    code: Annotated[str, Meta(max_length=64)]
    text: Text


Message = Hello | Welcome | Heartbeat | Credit | Parcel | Drain | Drained | Goodbye | SessionRefusal
_TAGS = frozenset(
    ("hello", "welcome", "heartbeat", "credit", "parcel", "drain", "drained", "goodbye", "refusal"),
)


class Envelope(Struct, frozen=True, array_like=True):
    """What stands around each message.

    Attributes:
        sender: who sends.
        session: number that the dialer chose for this session, 0 when a refusal belongs to none.
        sequence: 0 for the handshake and for refusals, then 1, 2, 3 ... in each direction.
        trace: W3C trace context (`traceparent`) of the request that this belongs to.
        message: the message.
    """

    sender: Identity
    session: Number
    sequence: Number
    trace: Text | None
    message: Message


@dataclass(frozen=True, slots=True)
class Undecodable:
    """Bytes that are no frame: the reason that is counted, and a detail for the log."""

    reason: str
    detail: str


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)
_parts = msgspec.msgpack.Decoder(list[msgspec.Raw])
_word = msgspec.msgpack.Decoder(str)


def encode(envelope: Envelope) -> bytes:
    """Return the frame of an envelope."""
    return _PREFIX + _encoder.encode(envelope)


def decode(frame: bytes, max_frame_bytes: int = MAX_FRAME_BYTES) -> Envelope | Undecodable:
    """Return the envelope of a frame, or why the bytes are none. Never raises, whatever the bytes are."""
    if len(frame) > max_frame_bytes:
        return Undecodable("oversized", f"{len(frame)} bytes, at most {max_frame_bytes} are read")
    if frame[:2] != MAGIC or len(frame) < len(_PREFIX):
        return Undecodable("magic", f"begins with {bytes(frame[:8])!r}, not with {MAGIC!r}")
    if frame[2] != SCHEMA_VERSION:
        return Undecodable("version", f"schema version {frame[2]}, this process speaks {SCHEMA_VERSION}")
    try:
        return _decoder.decode(memoryview(frame)[3:])
    except msgspec.ValidationError as error:
        return Undecodable("tag" if _has_unknown_tag(frame) else "types", str(error)[:200])
    except UNREADABLE as error:
        return Undecodable("malformed", str(error)[:200])


def _has_unknown_tag(frame: bytes) -> bool:
    """Return whether the message is of a kind that this schema lacks; only asked about frames that failed."""
    try:
        message = _parts.decode(_parts.decode(memoryview(frame)[3:])[4])
        return _word.decode(message[0]) not in _TAGS
    except (*UNREADABLE, IndexError):
        return False


def checked_text(what: str, value: object) -> str:
    """Return a name or a channel, or raise TypeError or ValueError with the bound."""
    if not isinstance(value, str):
        raise TypeError(f"{what} must be text, got {type(value).__name__}")
    if not 1 <= len(value) <= 128:
        raise ValueError(f"{what} must have 1..128 characters, got {len(value)}")
    return value


def checked_name(what: str, value: object) -> str:
    """Return the name of a node or a role, or raise TypeError or ValueError with the form."""
    if not isinstance(value, str):
        raise TypeError(f"{what} must be text, got {type(value).__name__}")
    if NODE_NAME.fullmatch(value) is None:
        raise ValueError(f"{what} must be 1..64 letters, digits, '.', '_' or '-', got {value[:80]!a}")
    return value
