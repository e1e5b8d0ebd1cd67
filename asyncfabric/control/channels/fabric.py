"""FabricChannels: channels over a fabric's small messages, long ones in parts.

Event loop's thread. It takes all messages of the fabric. A fabric's messages come in any order: they are numbered by
sender and recipient. A member that waits reads the fabric for all members of the process, so that a single one is woken
once for what came; senders that wait for their window read as well. With whom there are sessions: fabric_sessions.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import anyio

from asyncfabric._groups import unwrapped
from asyncfabric._notice import Notice
from asyncfabric.control.channels.channel import WINDOW, Codec
from asyncfabric.control.channels.fabric_sessions import FabricSessions, MessageFabric
from asyncfabric.control.channels.member import MemberChannel
from asyncfabric.control.channels.pieces import (
    END,
    LAST,
    MAX_MESSAGE_BYTES,
    PART,
    TAKEN,
    MessagePiece,
    PieceStream,
    decode_piece,
    encode_piece,
    part_bytes,
)
from asyncfabric.errors import BrokenError, BusyError, FabricError, PeerError
from asyncfabric.unreadable import UNREADABLE

logger: logging.Logger = logging.getLogger("asyncfabric.control")

Message = TypeVar("Message")


class FabricChannels(Generic[Message]):
    """The members of one process, which share its fabric, and their peers, known by address."""

    def __init__(
        self,
        fabric: MessageFabric,
        codec: Codec[Message],
        addresses: Mapping[str, Any] | Callable[[str], Any],
        *,
        window: int = WINDOW,
    ) -> None:
        """Carry the messages of a codec.

        Args:
            fabric: takes and sends the messages; nobody else reads its messages.
            codec: of the messages.
            addresses: the FabricAddress of each member of all processes. Or FabricAddress.parse, where each fabric has
                one member whose name is `str(fabric.address)`: then everybody who is sent to or sends is a member.
            window: messages of one member to another one that may wait to be received.

        Raises:
            ValueError: window is not positive.
        """
        if window < 1:
            raise ValueError(f"window must be at least 1 message, got {window}")
        self._fabric = fabric
        self._codec = codec
        self._window = window
        self._members: dict[str, MemberChannel[Message]] = {}
        self._outgoing: dict[tuple[str, str], PieceStream] = {}
        self._incoming: dict[tuple[str, str], PieceStream] = {}
        self._owed: set[tuple[str, str]] = set()
        self._sending: deque[tuple[str, Any, Any]] = deque()
        self._messages = fabric.messages()
        self._changed = Notice()
        self._reading: anyio.CancelScope | None = None
        self._sessions = FabricSessions(fabric, addresses, self._changed, self._found, self._lost)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the members of all processes; of those whose names are read, the ones with a session."""
        return self._sessions.names

    def open(self, name: str) -> MemberChannel[Message]:
        """Return the channel of a member that lives here, with sessions to all others.

        Raises:
            ValueError: it has no address, or the name is taken; where names are read, it is not this fabric's.
        """
        self._sessions.admit(name, self._members)
        mine = self._members[name] = MemberChannel(name, self, self._codec)
        for other in self._sessions.present:
            if other != name:
                mine.find(other)
        return mine

    async def run(self, watched: Iterable[str] | None = None) -> None:
        """Read for all members, connect to the watched ones, all by default, and report which of them die, for ever.

        Where names are read, all who have a session are watched.

        Raises:
            ClosedError: the fabric is closed.

        Cancellation: losses are not noticed any more; members that wait read on.
        """
        with unwrapped():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._sessions.watch, watched, self._members)
                while True:
                    await self.more(self._changed)

    # ---- Carrier

    async def carry(self, source: str, to: str, data: bytes) -> None:
        """Send the bytes of a message, in parts; it leaves by itself. See Carrier.

        Raises:
            PeerError: there is no session with `to`.
            ValueError: the message is too long.

        Cancellation: before its first part nothing was sent; then the rest goes all the same.
        """
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are carried")
        to, peer = await self._sessions.reach(to)
        stream = self._outgoing.setdefault((source, to), PieceStream())
        while stream.messages - stream.taken >= self._window:
            await self.more(self._changed)
            if self._outgoing.get((source, to)) is not stream:
                raise self._sessions.no_session(to)
        most = part_bytes(source, self._sessions.written(to))
        for begin in range(0, max(1, len(data)), most):
            kind = LAST if begin + most >= len(data) else PART
            piece = MessagePiece(source, self._sessions.written(to), kind, stream.number, data[begin : begin + most])
            with anyio.CancelScope(shield=begin > 0):
                await self._post(to, peer, piece)
            stream.number += 1
        stream.messages += 1
        self._end_failed()

    async def leave(self, name: str) -> None:
        """Report the end of a member to all peers that can be reached; see Carrier.

        Cancellation: some peers may not know.
        """
        del self._members[name]
        if self._reading is not None:
            self._reading.cancel()  # it may be the one that reads
        for member in self._members.values():
            member.lose(name, "it was closed")
        self._sessions.leave(name)

        async def report(to: str, peer: Any) -> None:
            number = self._outgoing.setdefault((name, to), PieceStream()).number
            try:
                if peer is None:
                    _, peer = await self._sessions.reach(to)
                await self._post(to, peer, MessagePiece(name, self._sessions.written(to), END, number, b""))
            except FabricError as error:
                logger.info("%s was not sent that %s ended: %s", to, name, error)

        async with anyio.create_task_group() as tasks:
            for to in self._sessions.present:
                if to not in self._members:
                    tasks.start_soon(report, to, self._sessions.peers.get(to))

    def taken(self, source: str, to: str) -> None:
        """Count a received message, and report it to its sender when half a window was received."""
        stream = self._incoming.get((source, to))
        if stream is None:
            return
        stream.taken += 1
        if stream.taken - stream.reported >= max(1, self._window // 2):
            self._owed.add((source, to))
            self._report_taken()

    async def more(self, changed: Notice) -> None:
        """Read the fabric, or wait for the member that reads.

        Cancellation: only this wait ends; nothing is lost.
        """
        if self._owed and not self._report_taken():
            await self._fabric.wait_writable()
            return
        if self._reading is not None:
            await self._changed.wait()
            return
        try:
            with anyio.CancelScope() as self._reading:
                message = await self._messages.__anext__()
                self._take(message.peer, message.payload)
                self._gather()
        finally:
            self._reading = None
            self._changed.notify()

    def gather_nowait(self) -> None:
        """Put what is here now into the members' channels, and wake who waits: it may be for them."""
        if self._gather():
            if self._reading is not None:
                self._reading.cancel()
            self._changed.notify()

    def _gather(self) -> int:
        messages = self._messages.take_nowait()
        for message in messages:
            self._take(message.peer, message.payload)
        return len(messages)

    # ---- pieces

    async def _post(self, name: str, peer: Any, piece: MessagePiece) -> None:
        payload = encode_piece(piece)
        while True:
            if not self._sessions.carries(name, peer):
                self._sessions.end(name, peer, "the connection ended")
                raise self._sessions.no_session(name)
            try:
                self._sending.append((name, peer, self._fabric.send(peer, payload)))
                return
            except BusyError:
                await self._fabric.wait_writable()

    def _end_failed(self) -> None:
        """End the sessions of peers to which a piece could not leave."""
        while self._sending and self._sending[0][2].ended:
            name, peer, transfer = self._sending.popleft()
            try:
                transfer.result()
            except BrokenError as error:
                self._sessions.end(name, peer, str(error))

    def _report_taken(self) -> bool:
        """Report what was received to those who wait for it; return whether there was room for all."""
        for source, to in list(self._owed):
            stream, peer = self._incoming.get((source, to)), self._sessions.peers.get(source)
            if stream is None or peer is None or not self._sessions.carries(source, peer):
                self._owed.discard((source, to))
                continue
            piece = MessagePiece(to, self._sessions.written(source), TAKEN, stream.taken, b"")
            try:
                self._fabric.send(peer, encode_piece(piece))
            except BusyError:
                return False
            except PeerError as error:
                logger.info("%s was not sent what %s received: %s", source, to, error)
            stream.reported = stream.taken
            self._owed.discard((source, to))
        return True

    def _take(self, peer: Any, payload: bytes) -> None:
        try:
            piece = decode_piece(payload)
        except UNREADABLE as error:
            logger.warning("%r sent what is no message of a channel: %s", peer, error)
            return
        source = self._sessions.sender(peer, piece, receives=bool(self._members))
        if source is None:
            return
        to = self._sessions.recipient(piece, self._members)
        if piece.kind == TAKEN:
            outgoing = self._outgoing.get((to, source))
            if outgoing is not None and outgoing.taken < piece.number <= outgoing.messages:
                outgoing.taken = piece.number
            return
        stream = self._incoming.get((source, to))
        if stream is None:
            member = self._members.get(to)
            older = 0 if member is None else -member.untaken(source)
            stream = self._incoming[source, to] = PieceStream(taken=older, reported=older)
        for found in stream.in_order(piece):
            if found.kind == END:
                self._sessions.lose(source, "it was closed")
                return
            if (whole := stream.whole(found)) is not None and (member := self._members.get(to)) is not None:
                member.put(source, whole)
        untaken = stream.messages - max(stream.taken, 0) if to in self._members else 0
        if stream.overrun or untaken > self._window:
            self._sessions.bar(peer)
            self._sessions.lose(source, "it sent more than its window has room for")

    # ---- sessions

    def _found(self, name: str) -> None:
        for member in self._members.values():
            member.find(name)

    def _lost(self, name: str, reason: str) -> None:
        for streams in (self._outgoing, self._incoming):
            for ends in [ends for ends in streams if name in ends]:
                del streams[ends]
        for member in self._members.values():
            member.lose(name, reason)
