"""DirectPath: messages of StoreChannels over a fabric, which takes some microseconds where a store takes milliseconds.

Event loop's thread. Who is there stays the store's to know. A message goes directly once the process of its recipient
has stated, over the fabric, that it found the sender: so nothing comes from members that nobody knows yet. A piece that
cannot leave, or is not known to have arrived, goes to the store under the number that it has; recipients put pieces in
order by number and drop what comes twice. Members' addresses in the store are `TOKEN ADDRESS`: the token names the
DirectPath, since a process may begin anew with the same fabric.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import anyio
from anyio.abc import TaskGroup

from asyncfabric.control.channels.fabric_sessions import MessageFabric
from asyncfabric.control.channels.pieces import (
    KNOWN,
    LAST,
    PART,
    MessagePiece,
    PieceStream,
    decode_piece,
    encode_piece,
    part_bytes,
)
from asyncfabric.errors import BusyError, ClosedError, FabricError
from asyncfabric.unreadable import UNREADABLE

logger: logging.Logger = logging.getLogger("asyncfabric.control")


@dataclass(slots=True)
class _PostedPiece:
    """A piece, and the transfer that it left with; None: it did not leave."""

    piece: MessagePiece
    transfer: Any


class DirectPath:
    """What the members of this process send and receive over its fabric; members are named by their numbers."""

    def __init__(self, fabric: MessageFabric, arrived: Callable[[MessagePiece], None]) -> None:
        """Use a fabric whose messages nobody else reads; `arrived` gets each piece, in any order, and some twice."""
        self._fabric = fabric
        self._messages = fabric.messages()
        self._arrived = arrived
        self._token = secrets.token_hex(8)
        self._places: dict[str, tuple[str, int]] = {}  # by number: token and fabric's incarnation of a member
        self._peers: dict[str, Any] = {}  # by number, those that this process is connected to
        self._known: set[tuple[str, str]] = set()  # number of a member here, and token of a process that found it
        self._posted: deque[_PostedPiece] = deque()
        self._tasks: TaskGroup | None = None

    @property
    def address(self) -> str:
        """What members of other processes read in the store."""
        return f"{self._token} {self._fabric.address}"

    async def run(self) -> None:
        """Receive, and introduce this process to members that are found, until the fabric is closed.

        Cancellation: nothing more is received.
        """
        async with anyio.create_task_group() as self._tasks:
            with suppress(ClosedError):
                async for message in self._messages:
                    self._take(message)
                    self.gather_nowait()

    def gather_nowait(self) -> None:
        """Take in the pieces that are here."""
        for message in self._messages.take_nowait():
            self._take(message)

    def find(self, number: int, address: str) -> None:
        """Connect to a member of another process, whose address is in the store, and send it that it is known here."""
        token, _, text = address.partition(" ")
        try:
            place = type(self._fabric.address).parse(text)
        except ValueError as error:
            logger.warning("member %d has an address in the store that is none: %s", number, error)
            return
        if place.incarnation != self._fabric.address.incarnation and self._tasks is not None:
            self._places[str(number)] = token, place.incarnation
            self._tasks.start_soon(self._introduce, str(number), place)

    def lose(self, number: int) -> None:
        """Send nothing more to a member."""
        self._peers.pop(str(number), None)
        self._places.pop(str(number), None)

    def send(self, source: int, to: int, stream: PieceStream, data: bytes) -> bool:
        """Send a message, whole, or return False where it cannot go directly; `stream` numbers its pieces."""
        mine, its = str(source), str(to)
        peer = self._peers.get(its)
        if peer is None or (mine, self._places[its][0]) not in self._known:
            return False
        most = part_bytes(mine, its)
        for begin in range(0, max(1, len(data)), most):
            kind = LAST if begin + most >= len(data) else PART
            piece = MessagePiece(mine, its, kind, stream.number, data[begin : begin + most])
            stream.number += 1
            transfer = None
            with suppress(FabricError):  # the store takes what has no room
                transfer = self._fabric.send(peer, encode_piece(piece))
            self._posted.append(_PostedPiece(piece, transfer))
        stream.messages += 1
        return True

    def take_unsent(self) -> list[MessagePiece]:
        """Take out the pieces that did not leave, or are not known to have arrived."""
        found: list[MessagePiece] = []
        under_way: deque[_PostedPiece] = deque()
        for one in self._posted:
            if one.transfer is not None and not one.transfer.ended:
                under_way.append(one)
            elif one.transfer is None or not _went_well(one.transfer):
                found.append(one.piece)
        self._posted = under_way
        return found

    async def wait_sent(self, source: int) -> None:
        """Wait until no piece of a member here is under way.

        Cancellation: only this wait ends.
        """
        for one in tuple(self._posted):
            if one.piece.source == str(source) and one.transfer is not None:
                with suppress(FabricError):
                    await one.transfer

    async def _introduce(self, number: str, place: Any) -> None:
        known = encode_piece(MessagePiece(self._token, number, KNOWN, 0, b""))
        try:
            peer = await self._fabric.connect(place)
            while True:
                try:
                    await self._fabric.send(peer, known)
                    break
                except BusyError:
                    await self._fabric.wait_writable()
        except FabricError as error:
            logger.info("messages to member %s go through the store: %s", number, error)
            return
        if number in self._places:
            self._peers[number] = peer

    def _take(self, message: Any) -> None:
        try:
            piece = decode_piece(message.payload)
        except UNREADABLE as error:
            logger.warning("%r sent what is no message of a channel: %s", message.peer, error)
            return
        if piece.kind == KNOWN:
            self._known.add((piece.to, piece.source))
        elif self._places.get(piece.source, ("", 0))[1] == message.peer.incarnation:
            self._arrived(piece)
        else:
            logger.info("%r sent a message of member %s, which is none of its", message.peer, piece.source[:20])


def _went_well(transfer: Any) -> bool:
    try:
        transfer.result()
    except FabricError:
        return False
    return True
