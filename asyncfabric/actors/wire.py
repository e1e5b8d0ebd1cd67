"""Frames between nodes for actors: msgspec structs in MessagePack, one schema version, an error for what is not known.

Pure; no I/O. What a frame carries for an actor (`body`) stays raw here: only the actor knows the type of its messages.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from asyncfabric.errors import RemoteProtocolError
from asyncfabric.unreadable import UNREADABLE

CHANNEL = "actors"
VERSION = 1


Outcome = Literal["died", "raised", "unhandled", "refused", "withdrawn"]


class Frame(msgspec.Struct, frozen=True, tag_field="type", kw_only=True):
    """What all frames carry. `number` is the caller's, unique among its calls."""

    number: int
    version: int = VERSION


class Call(Frame, frozen=True, tag="call"):
    """Put a message into an actor's mailbox; `asked` calls are answered, others are accepted."""

    actor: str
    incarnation: int
    kind: str
    body: msgspec.Raw
    asked: bool


class Lookup(Frame, frozen=True, tag="lookup"):
    """Ask for the present life of a name."""

    actor: str


class CancelCall(Frame, frozen=True, tag="cancel"):
    """Take a call back, or cancel its handler. Answered by the call's `CallFailed`, always."""


class Accepted(Frame, frozen=True, tag="accepted"):
    """The message is in the mailbox."""


class Answer(Frame, frozen=True, tag="answer"):
    """What the handler returned."""

    body: msgspec.Raw


class ActorFound(Frame, frozen=True, tag="found"):
    """The present life of a name."""

    incarnation: int


class CallFailed(Frame, frozen=True, tag="failed"):
    """Why there is no answer, with the first cause of it."""

    outcome: Outcome
    reason: str
    origin: str = ""
    kind: str = ""
    traceback: str = ""


AnyFrame = Call | Lookup | CancelCall | Accepted | Answer | ActorFound | CallFailed


class _Head(msgspec.Struct, frozen=True):
    """What can be read of a frame of another version."""

    number: int
    version: int
    type: str


_encoder = msgspec.msgpack.Encoder()
_frames: msgspec.msgpack.Decoder[AnyFrame] = msgspec.msgpack.Decoder(AnyFrame)
_heads = msgspec.msgpack.Decoder(_Head)


class UnknownFrame(RemoteProtocolError):
    """A frame that this version cannot read.

    Attributes:
        number: the number that the sender waits for, None when it waits for nothing or nothing can be read.
    """

    def __init__(self, message: str, number: int | None) -> None:
        super().__init__(message)
        self.number = number


def encoded(value: object) -> bytes:
    """Return a value as MessagePack.

    Raises:
        TypeError: msgspec cannot encode it.
    """
    return _encoder.encode(value)


def decoded(body: bytes) -> AnyFrame:
    """Return the frame in these bytes.

    Raises:
        UnknownFrame: no frame, or none of this version.
    """
    try:
        frame = _frames.decode(body)
    except UNREADABLE as error:
        raise _unknown(body, str(error)) from None
    if frame.version != VERSION:
        raise _unknown(body, f"schema version {frame.version}, this node speaks {VERSION}")
    return frame


def body_of(raw: msgspec.Raw | bytes, wanted: Any) -> Any:
    """Return what a frame carries as the wanted type.

    Raises:
        msgspec.DecodeError: it is something else.
    """
    try:
        return msgspec.msgpack.decode(raw, type=wanted)
    except msgspec.DecodeError:
        raise
    except UNREADABLE as error:
        raise msgspec.DecodeError(str(error)) from None


def _unknown(body: bytes, why: str) -> UnknownFrame:
    try:
        head = _heads.decode(body)
    except UNREADABLE:
        return UnknownFrame(f"a frame that cannot be read: {why[:200]}", None)
    waits = head.type in ("call", "lookup", "cancel") or head.type not in _ANSWERS
    return UnknownFrame(f"a frame {head.type[:40]!r} that cannot be read: {why[:200]}", head.number if waits else None)


_ANSWERS = ("accepted", "answer", "found", "failed")
