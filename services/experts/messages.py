"""What a conductor sends to the expert nodes of its group. Pure values; loads no torch."""

from __future__ import annotations

import msgspec

from asyncfabric.actors import Message

EXPERT = "expert"
"""Role of expert nodes, and name of their actor."""


class Seated(msgspec.Struct, frozen=True):
    """A node that is in a group.

    Attributes:
        experts: how many of each layer it holds.
        most_tokens: of one forward.
        vocabulary: token ids are smaller.
        buffer_bytes: of its exchange.
    """

    experts: int
    most_tokens: int
    vocabulary: int
    buffer_bytes: int


class SpokenTokens(msgspec.Struct, frozen=True):
    """What became of a step of the group at one node.

    Attributes:
        tokens: the answer; empty where ranks were missing, or where the node had no prompt.
        missing: ranks that the node waited for in vain.
        lost: whether they are known to be lost; otherwise they were late.
        because: the error, for people.
    """

    tokens: list[int] = []
    missing: list[int] = []
    lost: bool = False
    because: str = ""


class SeatExpert(Message[Seated]):
    """Join a group for the rest of the node's life; answered when all have joined.

    Attributes:
        group: its name, different from that of any other.
        rank: of the node that is asked.
        addresses: the FabricAddress of each rank as bytes.
        patience_s: seconds to wait for the others.
    """

    group: str
    rank: int
    addresses: list[bytes]
    patience_s: float


class Speak(Message[SpokenTokens]):
    """Do `count` forwards together with all others, and answer greedily.

    Attributes:
        prompt: token ids; empty: take part without tokens.
        count: tokens of the answer; the same for all ranks.
        patience_s: seconds that one half of a step waits for the others.
    """

    prompt: list[int]
    count: int
    patience_s: float


class LeaveOut(Message[None]):
    """Go on without ranks; also begins anew after a step that failed, with none.

    Attributes:
        ranks: the same for all who receive it.
        patience_s: seconds to wait for the others.
    """

    ranks: list[int]
    patience_s: float
