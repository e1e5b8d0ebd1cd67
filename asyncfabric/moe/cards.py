"""Card: what a rank gives each other one when an exchange opens; and the channel that carries cards. Pure values."""

from __future__ import annotations

import msgspec

from asyncfabric.control import Channel, Codec
from asyncfabric.errors import RemoteProtocolError
from asyncfabric.unreadable import UNREADABLE


class Card(msgspec.Struct, frozen=True, tag_field="moe", tag="card", forbid_unknown_fields=True, kw_only=True):
    """What a rank gives each other rank when an exchange opens.

    Attributes:
        tag: of the exchange.
        epoch: how often the exchange was opened before.
        rank: who gives it.
        digest: of the configuration and of who is left; all must be equal.
        imm: the first immediate that the rank would use; the largest of all is taken.
        keys: the right to write to the memory of each of its lanes.
    """

    tag: str
    epoch: int
    rank: int
    digest: str
    imm: int
    keys: tuple[bytes, ...]


_decoder = msgspec.msgpack.Decoder(Card)


def decode_card(data: bytes) -> Card:
    """Return the card of bytes from outside; raises RemoteProtocolError for anything else."""
    try:
        return _decoder.decode(data)
    except UNREADABLE as error:
        raise RemoteProtocolError(f"{len(data)} bytes are no card of an exchange: {error}") from None


CARD_CODEC: Codec[Card] = Codec(msgspec.msgpack.encode, decode_card)

CardChannel = Channel[Card]
