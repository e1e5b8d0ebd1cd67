"""What directory and nodes send to each other: bodies of parcels on two channels. Tagged structs, in MessagePack.

Pure. The node that a request is about is its sender, whom the session vouches for; so nobody speaks for another.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from asyncfabric.config import MOST_SECRET_BYTES
from asyncfabric.control.directory import MAX_LABELS, Node, NodeChange
from asyncfabric.control.messages import Name, NodeName, Number, Text
from asyncfabric.unreadable import UNREADABLE

TO_DIRECTORY: Final = "directory"
FROM_DIRECTORY: Final = "directory.view"

Log = Annotated[str, Meta(max_length=64)]
"""Which history of the table epochs belong to: directories that share a store have the same."""
Labels = Annotated[dict[Name, Text], Meta(max_length=MAX_LABELS)]


class Register(Struct, frozen=True, tag="register"):
    """Put me into the directory, or change what it states of me."""

    role: NodeName
    address: Text
    labels: Labels


class Renew(Struct, frozen=True, tag="renew"):
    """My lease goes on."""


class DrainMe(Struct, frozen=True, tag="drain"):
    """I take no new work."""


class LeaveMe(Struct, frozen=True, tag="leave"):
    """I am gone."""


class WatchFrom(Struct, frozen=True, tag="watch"):
    """Send me all changes after this epoch of this log, or everything if you do not know that log so far back."""

    epoch: Number
    log: Log = ""


class AskSecret(Struct, frozen=True, tag="ask_secret"):
    """Give me the secret of the cluster's fabrics."""


class Registered(Struct, frozen=True, tag="registered"):
    """You are in, and have to renew within `lease_ns`."""

    lease_ns: Number


class Unregistered(Struct, frozen=True, tag="unregistered"):
    """You are not in. Register `again`, or do not: the reason will not pass."""

    reason: Text
    again: bool


class Snapshot(Struct, frozen=True, tag="snapshot"):
    """Everything, at an epoch of a log. Not settled: nodes that a former log had may still have to register."""

    epoch: Number
    settled: bool
    nodes: tuple[Node, ...]
    log: Log = ""


class Changes(Struct, frozen=True, tag="changes"):
    """Changes in the order of their epochs, each one more than the one before."""

    changes: tuple[NodeChange, ...]


class Settled(Struct, frozen=True, tag="settled"):
    """A full lease has passed since this log began: who has not registered is gone."""


class ClusterSecret(Struct, frozen=True, tag="secret"):
    """The secret of the cluster's fabrics; empty, with the reason, where there is none for this peer."""

    secret: Annotated[bytes, Meta(max_length=MOST_SECRET_BYTES)]
    reason: Text = ""

    def __repr__(self) -> str:
        """Return a text without the secret: messages are logged."""
        return f"ClusterSecret(reason={self.reason!r})"


Request = Register | Renew | DrainMe | LeaveMe | WatchFrom | AskSecret
News = Registered | Unregistered | Snapshot | Changes | Settled | ClusterSecret

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_news: msgspec.msgpack.Decoder[News] = msgspec.msgpack.Decoder(News)


def encode(message: Request | News) -> bytes:
    """Return the body of a message."""
    return _encoder.encode(message)


def decode_request(body: bytes) -> Request | None:
    """Return a request, None for bytes that are none. Never raises."""
    try:
        return _requests.decode(body)
    except UNREADABLE:
        return None


def decode_news(body: bytes) -> News | None:
    """Return news, None for bytes that are none. Never raises."""
    try:
        return _news.decode(body)
    except UNREADABLE:
        return None
