"""What the participants of an update are called, and the type of the channel that carries their messages.

Any asyncfabric.control.Channel of WEIGHT_CODEC does. Everybody has a session with the coordinator while both live;
sessions among the others may begin with the first message, and the beginnings and ends of those are not needed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from asyncfabric.control import Channel, Codec, PeerFound, PeerLost
from asyncfabric.weights.messages import WeightMessage, decode_message, encode_message

COORDINATOR = "coordinator"

AGAIN_S = 0.05
"""A message of a version to a participant without a session is sent again after so long, while the version is open:
participants that have just begun find the coordinator first, and each other later."""


def trainer_name(rank: int) -> str:
    """Return what a trainer is called in messages."""
    return f"trainer-{rank}"


def receiver_name(replica: str, receiver: int) -> str:
    """Return what a receiver of a replica is called in messages."""
    return f"{replica}/{receiver}"


def receiver_of(name: str) -> tuple[str, int]:
    """Return (replica, receiver) of a receiver's name; raises ValueError for other names and other spellings."""
    replica, _, receiver = name.rpartition("/")
    if not (replica and receiver.isdecimal() and receiver_name(replica, int(receiver[:9])) == name):
        raise ValueError(f"{name[:80]!a} is no receiver's name, which is replica/number")
    return replica, int(receiver)


WEIGHT_CODEC: Codec[WeightMessage] = Codec(encode_message, decode_message)
"""How a channel turns the messages of an update into bytes and back."""

Event = WeightMessage | PeerFound | PeerLost
"""What a participant receives."""

WeightChannel = Channel[WeightMessage]
"""Carries the messages of one participant."""

Send = Callable[[str, WeightMessage], Awaitable[None]]
"""Sends a message to a participant, for one of a version: a message that cannot be sent is logged, not raised."""
