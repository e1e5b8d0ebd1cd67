"""The pieces in which FabricChannels and StoreChannels carry messages, and the streams that put them in order.

Pure values and rules, event loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

PAYLOAD_BYTES = 8192
"""Of one message of a fabric (MAX_MESSAGE_BYTES of asyncfabric)."""
HEAD_BYTES = 40
"""Of a piece, beside its names."""
MAX_MESSAGE_BYTES = 64 << 20
"""Of one message of a channel; a stream holds at most twice as much that is not a whole message yet."""


class MessagePiece(msgspec.Struct, frozen=True, array_like=True):
    """A part of a message, or what a member reports about its window or its end.

    Attributes:
        source, to: members.
        kind: 0 and 1 part and last part of a message, 2 the source has ended, 3 the source received `number` messages,
            4 the process that sends it has found the recipient.
        number: of the part in what the source ever sent to the recipient.
        data: of the message.
    """

    source: str
    to: str
    kind: int
    number: int
    data: bytes


PART, LAST, END, TAKEN, KNOWN = range(5)
decode_piece: Callable[[bytes], MessagePiece] = msgspec.msgpack.Decoder(MessagePiece).decode
encode_piece: Callable[[MessagePiece], bytes] = msgspec.msgpack.Encoder().encode


def part_bytes(source: str, to: str) -> int:
    """Return how many bytes of a message go into one piece between members of these names."""
    return PAYLOAD_BYTES - HEAD_BYTES - len(source.encode()) - len(to.encode())


@dataclass(slots=True)
class PieceStream:
    """One member's messages to another one; one end of it is here. Numbers count parts, `messages` count messages.

    Attributes:
        number: of the next part.
        messages: that were sent, or came.
        taken: of them, received by the recipient; below zero while it has more of an earlier session.
        reported: `taken`, as the sender knows it.
        held_bytes: of parts whose message is not whole.
    """

    number: int = 0
    messages: int = 0
    taken: int = 0
    reported: int = 0
    held_bytes: int = 0
    early: dict[int, MessagePiece] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)

    def in_order(self, piece: MessagePiece) -> Iterator[MessagePiece]:
        """Take a piece that came; yields it and those that waited for it, once their turn has come."""
        if piece.number >= self.number and piece.number not in self.early:
            self.early[piece.number] = piece
            self.held_bytes += len(piece.data) + HEAD_BYTES
        while (found := self.early.pop(self.number, None)) is not None:
            self.number += 1
            yield found

    def whole(self, piece: MessagePiece) -> bytes | None:
        """Take the next part in order; returns its message if that is whole now."""
        self.parts.append(piece.data)
        if piece.kind != LAST:
            return None
        self.messages += 1
        self.held_bytes -= sum(len(part) + HEAD_BYTES for part in self.parts)
        data = b"".join(self.parts)
        self.parts.clear()
        return data

    @property
    def overrun(self) -> bool:
        """Whether the sender sent more than a recipient has to hold."""
        return self.held_bytes > 2 * MAX_MESSAGE_BYTES
