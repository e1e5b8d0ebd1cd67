"""FabricChannels: channels over a fabric's small messages, long ones in parts.

Event loop's thread. It takes all messages of the fabric. A fabric's messages come in any order: they are numbered by
sender and recipient. A member that waits reads the fabric for all members of the process, so that a single one is woken
once for what came; senders that wait for their window read as well.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import anyio
import msgspec

from asyncfabric._groups import unwrapped
from asyncfabric._notice import Notice
from asyncfabric.control.channels.channel import WINDOW, Codec
from asyncfabric.control.channels.member import MemberChannel
from asyncfabric.errors import BusyError, FabricError, PeerError
from asyncfabric.unreadable import UNREADABLE

PAYLOAD_BYTES = 8192
"""Of one message of a fabric (MAX_MESSAGE_BYTES of asyncfabric)."""
HEAD_BYTES = 40
"""Of a piece, beside its names."""
NEVER = 1 << 62
LAST_MESSAGES_S = 0.2
"""How long after the loss of a peer its last messages may still be read."""

logger: logging.Logger = logging.getLogger("asyncfabric.control")

Message = TypeVar("Message")


class MessageFabric(Protocol):
    """What is used of a fabric; asyncfabric.Fabric has it."""

    def messages(self) -> Any:
        """Return the stream of what comes."""

    def send(self, peer: Any, payload: bytes) -> Any:
        """Send a message to a connected peer; raises BusyError where there is no room."""

    async def connect(self, address: Any) -> Any:
        """Return the peer at an address.

        Cancellation: only this wait ends.
        """

    async def wait_writable(self) -> None:
        """Wait for room.

        Cancellation: only this wait ends.
        """

    def counter(self) -> Any:
        """Return a counter, whose waits end with the loss of a peer."""


class MessagePiece(msgspec.Struct, frozen=True, array_like=True):
    """A part of a message, or what a member reports about its window or its end.

    Attributes:
        source, to: members.
        kind: 0 and 1 part and last part of a message, 2 the source has ended, 3 the source received `number` messages.
        number: of the part in what the source ever sent to the recipient.
        data: of the message.
    """

    source: str
    to: str
    kind: int
    number: int
    data: bytes


PART, LAST, END, TAKEN = range(4)
_decoder = msgspec.msgpack.Decoder(MessagePiece)
_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class _Stream:
    """One member's messages to another one; one end of it is here. Numbers count parts, `messages` count messages."""

    number: int = 0
    messages: int = 0
    taken: int = 0
    reported: int = 0
    early: dict[int, MessagePiece] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)


class FabricChannels(Generic[Message]):
    """The members of one process, which share its fabric, and their peers, known by address."""

    def __init__(
        self, fabric: MessageFabric, codec: Codec[Message], addresses: Mapping[str, Any], *, window: int = WINDOW
    ) -> None:
        """Carry the messages of a codec; `addresses` has the FabricAddress of each member of all processes.

        Raises:
            ValueError: window is not positive.
        """
        if window < 1:
            raise ValueError(f"window must be at least 1 message, got {window}")
        self._fabric = fabric
        self._codec = codec
        self._window = window
        self._addresses = dict(addresses)
        self._peers: dict[str, Any] = {}
        self._lost: dict[str, str] = {}
        self._members: dict[str, MemberChannel[Message]] = {}
        self._outgoing: dict[tuple[str, str], _Stream] = {}
        self._incoming: dict[tuple[str, str], _Stream] = {}
        self._owed: set[tuple[str, str]] = set()
        self._sending: deque[Any] = deque()
        self._messages = fabric.messages()
        self._changed = Notice()
        self._reading: anyio.CancelScope | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the members of all processes."""
        return tuple(self._addresses)

    def open(self, name: str) -> MemberChannel[Message]:
        """Return the channel of a member that lives here, with sessions to all others.

        Raises:
            ValueError: it has no address, or the name is taken.
        """
        if name not in self._addresses or name in self._members:
            why = "is there already" if name in self._members else "has no address"
            raise ValueError(f"{name!r} {why}")
        mine = self._members[name] = MemberChannel(name, self, self._codec)
        for other in self._addresses:
            if other != name and other not in self._lost:
                mine.find(other)
        return mine

    async def run(self, watched: Iterable[str] | None = None) -> None:
        """Read for all members, connect to the watched ones, all by default, and report which of them die, for ever.

        Raises:
            ClosedError: the fabric is closed.

        Cancellation: losses are not noticed any more; members that wait read on.
        """
        with unwrapped():
            async with anyio.create_task_group() as tasks:
                for name in self._addresses if watched is None else watched:
                    if name not in self._members:
                        tasks.start_soon(self._watch, name)
                while True:
                    await self.more(self._changed)

    # ---- Carrier

    async def carry(self, source: str, to: str, data: bytes) -> None:
        """Send the bytes of a message, in parts; it leaves by itself. See Carrier.

        Cancellation: before its first part nothing was sent; then the rest goes all the same.
        """
        peer = await self._peer(to)
        stream = self._outgoing.setdefault((source, to), _Stream())
        while stream.messages - stream.taken >= self._window:
            await self.more(self._changed)
            self._check(to)
        part_bytes = PAYLOAD_BYTES - HEAD_BYTES - len(source.encode()) - len(to.encode())
        for begin in range(0, max(1, len(data)), part_bytes):
            kind = LAST if begin + part_bytes >= len(data) else PART
            piece = MessagePiece(source, to, kind, stream.number, data[begin : begin + part_bytes])
            with anyio.CancelScope(shield=begin > 0):
                await self._post(peer, piece)
            stream.number += 1
        stream.messages += 1
        while self._sending and self._sending[0].ended:
            self._sending.popleft().result()  # raises for one that could not leave

    async def leave(self, name: str) -> None:
        """Report the end of a member to all peers that can be reached; see Carrier.

        Cancellation: some peers may not know.
        """
        del self._members[name]
        if self._reading is not None:
            self._reading.cancel()  # it may be the one that reads
        for member in self._members.values():
            member.lose(name, "it was closed")
        self._lost[name] = "it was closed"

        async def report(to: str) -> None:
            number = self._outgoing.setdefault((name, to), _Stream()).number
            try:
                await self._post(await self._peer(to), MessagePiece(name, to, END, number, b""))
            except FabricError as error:
                logger.info("%s was not sent that %s ended: %s", to, name, error)

        async with anyio.create_task_group() as tasks:
            for to in self._addresses:
                if to not in self._members and to not in self._lost:
                    tasks.start_soon(report, to)

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
                self.gather_nowait()
        finally:
            self._reading = None
            self._changed.tell()

    def gather_nowait(self) -> None:
        """Put what is here now into the members' channels."""
        for message in self._messages.take_nowait():
            self._take(message.peer, message.payload)

    # ---- pieces

    async def _peer(self, name: str) -> Any:
        self._check(name)
        if name not in self._peers:
            self._peers[name] = await self._fabric.connect(self._addresses[name])
        return self._peers[name]

    def _check(self, name: str) -> None:
        if name in self._lost or name not in self._addresses:
            why = self._lost.get(name, "it has no address")
            raise PeerError(f"there is no session with {name}: {why}", remedy="is its process alive?")

    async def _post(self, peer: Any, piece: MessagePiece) -> None:
        payload = _encode(piece)
        while True:
            try:
                self._sending.append(self._fabric.send(peer, payload))
                return
            except BusyError:
                await self._fabric.wait_writable()

    def _report_taken(self) -> bool:
        """Report what was received to those who wait for it; return whether there was room for all."""
        for source, to in list(self._owed):
            stream, peer = self._incoming[source, to], self._peers.get(source)
            try:
                if peer is not None and source not in self._lost:
                    self._fabric.send(peer, _encode(MessagePiece(to, source, TAKEN, stream.taken, b"")))
            except BusyError:
                return False
            except PeerError as error:
                logger.info("%s was not sent what %s received: %s", source, to, error)
            stream.reported = stream.taken
            self._owed.discard((source, to))
        return True

    def _take(self, peer: Any, payload: bytes) -> None:
        try:
            piece = _decoder.decode(payload)
        except UNREADABLE as error:
            logger.warning("%r sent what is no message of a channel: %s", peer, error)
            return
        address = self._addresses.get(piece.source)
        if address is None or address.incarnation != peer.incarnation or piece.source in self._lost:
            return
        self._peers.setdefault(piece.source, peer)
        if piece.kind == TAKEN:
            stream = self._outgoing.get((piece.to, piece.source))
            if stream is not None and stream.taken < piece.number <= stream.messages:
                stream.taken = piece.number
        else:
            stream = self._incoming.setdefault((piece.source, piece.to), _Stream())
            if piece.number >= stream.number:
                stream.early[piece.number] = piece
            while (found := stream.early.pop(stream.number, None)) is not None:
                stream.number += 1
                self._take_in_order(stream, found)

    def _take_in_order(self, stream: _Stream, piece: MessagePiece) -> None:
        if piece.kind == END:
            self._lose(piece.source, "it was closed")
            return
        stream.parts.append(piece.data)
        if piece.kind == LAST:
            whole = b"".join(stream.parts)
            stream.parts.clear()
            if (member := self._members.get(piece.to)) is not None:
                member.put(piece.source, whole)

    # ---- losses

    async def _watch(self, name: str) -> None:
        try:
            peer = await self._peer(name)
            counter = self._fabric.counter()
            try:
                await counter.wait(NEVER, peers=[peer])
            finally:
                counter.close()
        except PeerError as error:
            with anyio.move_on_after(LAST_MESSAGES_S):  # what came before the loss may not have been read yet
                while name not in self._lost:
                    await self._changed.wait()
            self._lose(name, str(error))

    def _lose(self, name: str, reason: str) -> None:
        if name not in self._lost:
            self._lost[name] = reason
            for member in self._members.values():
                member.lose(name, reason)
            self._changed.tell()
