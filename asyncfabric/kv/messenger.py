"""Messenger: what the protocol needs of whatever carries its messages; and one over the fabric's own small messages.

Runs on the event loop's thread. Actors or sockets may carry the messages as well: lost, doubled and reordered messages
are the protocol's to survive; a wrong sender is not, so a messenger must know who sent what it delivers.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable
from itertools import count
from typing import Protocol

from asyncfabric import BusyError, Fabric, FabricAddress, RemoteProtocolError
from asyncfabric.kv.messages import MAX_FRAME_BYTES, KvMessage, decode_message, encode_message

logger: logging.Logger = logging.getLogger("asyncfabric.kv")

_HEAD = struct.Struct(">2sQHH")  # magic, number of the message, part, parts
_MAGIC = b"kv"
_PART_BYTES = 8192 - _HEAD.size
_MAX_PARTIAL = 64
"""Unfinished messages of one sender that are kept; the oldest gives way."""
_MAX_PARTS = 2 * MAX_FRAME_BYTES // _PART_BYTES
"""Parts of all of them together."""


class Messenger(Protocol):
    """Carries messages between the two ends of a stream."""

    async def send(self, to: FabricAddress, message: KvMessage) -> None:
        """Send a message to the process whose fabric has this address.

        Raises:
            PeerError: it cannot be reached.

        Cancellation: the message may or may not have left.
        """

    async def receive(self) -> tuple[int, KvMessage]:
        """Return the next message and the incarnation of its sender's fabric.

        Raises:
            ClosedError: there will be no more.

        Cancellation: no message is lost.
        """


class MessageHandler(Protocol):
    """An end of the protocol that takes messages: a KvInbox or a KvOutbox."""

    def handle(self, sender: int, message: KvMessage) -> bool:
        """Take a message; returns False for one that is not for this handler."""


async def deliver(messenger: Messenger, handlers: Iterable[MessageHandler]) -> None:
    """Hand each message to the handler that it is for, for ever; what nobody takes is logged and dropped.

    Raises:
        ClosedError: the messenger was closed.

    Cancellation: no message is lost.
    """
    ends = tuple(handlers)
    while True:
        sender, message = await messenger.receive()
        if not any(end.handle(sender, message) for end in ends):
            logger.warning("nobody takes %s from fabric %016x", type(message).__name__, sender)


class FabricMessenger:
    """Messages over `fabric.send` and `fabric.messages()`, long ones in parts; takes all messages of the fabric.

    Attributes:
        refused: parts and messages that were malformed; dropped and counted.
    """

    def __init__(self, fabric: Fabric) -> None:
        """Carry messages over an open fabric."""
        self._fabric = fabric
        self._numbers = count()
        self._messages = fabric.messages()
        self._partial: dict[int, dict[int, dict[int, bytes]]] = {}
        self.refused: int = 0

    async def send(self, to: FabricAddress, message: KvMessage) -> None:
        """Send a message.

        Raises:
            PeerError: the fabric cannot be reached.

        Cancellation: the message may or may not have left.
        """
        data = encode_message(message)
        peer = await self._fabric.connect(to)
        number = next(self._numbers)
        parts = max(1, -(-len(data) // _PART_BYTES))
        if len(data) > MAX_FRAME_BYTES or parts > 0xFFFF:
            raise ValueError(f"a message of {len(data)} bytes; at most {MAX_FRAME_BYTES} are carried")
        for part in range(parts):
            payload = _HEAD.pack(_MAGIC, number, part, parts) + data[part * _PART_BYTES : (part + 1) * _PART_BYTES]
            while True:
                try:
                    transfer = self._fabric.send(peer, payload)
                    break
                except BusyError:
                    await self._fabric.wait_writable()
            await transfer

    async def receive(self) -> tuple[int, KvMessage]:
        """Return the next whole message and the incarnation of its sender's fabric.

        Raises:
            ClosedError: the fabric is closed.

        Cancellation: no message is lost.
        """
        while True:
            received = await self._messages.__anext__()
            sender = received.peer.incarnation
            try:
                data = self._assemble(sender, received.payload)
                if data is not None:
                    return sender, decode_message(data)
            except RemoteProtocolError as error:
                self.refused += 1
                logger.warning("fabric %016x sent what is no message of ours: %s", sender, error)

    def _assemble(self, sender: int, payload: bytes) -> bytes | None:
        if len(payload) < _HEAD.size:
            raise RemoteProtocolError(f"a part of {len(payload)} bytes has no head")
        magic, number, part, parts = _HEAD.unpack_from(payload)
        if magic != _MAGIC or not part < parts or parts * _PART_BYTES > MAX_FRAME_BYTES + _PART_BYTES:
            raise RemoteProtocolError(f"a part with a bad head: {part} of {parts}")
        body = payload[_HEAD.size :]
        if parts == 1:
            return body
        partial = self._partial.setdefault(sender, {})
        found = partial.setdefault(number, {})
        found[part] = body
        if len(found) == parts:
            del partial[number]
            if not partial:
                del self._partial[sender]
            return b"".join(found[each] for each in range(parts) if each in found)
        if len(partial) > _MAX_PARTIAL:
            del partial[next(iter(partial))]
        if sum(len(each) for each in partial.values()) > _MAX_PARTS:
            del self._partial[sender]
            raise RemoteProtocolError(f"more than {_MAX_PARTS} parts of messages that are never finished")
        return None
