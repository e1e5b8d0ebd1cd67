"""MemberChannel: the end of a channel that its user holds, the same over every carrier.

Event loop's thread. It keeps what came until it is received, and holds to the guarantees of `channel` that depend on
one end alone: what a carrier puts here twice, late or from strangers is not received.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import Generic, Protocol, TypeVar

import anyio
from anyio.lowlevel import checkpoint

from asyncfabric._notice import Notice
from asyncfabric.control.channels.channel import Codec, PeerFound, PeerLost
from asyncfabric.errors import ClosedError, RemoteProtocolError

logger: logging.Logger = logging.getLogger("asyncfabric.control")

Message = TypeVar("Message")


class Carrier(Protocol):
    """What takes the bytes of messages from member to member."""

    async def carry(self, source: str, to: str, data: bytes) -> None:
        """Send the bytes of a message, in the order of the calls; waits while the recipient's window is full.

        Raises:
            PeerError: there is no session with `to`.

        Cancellation: the message has left whole or not at all.
        """

    async def leave(self, name: str) -> None:
        """End a member: its peers lose it.

        Cancellation: they find out as if the process had died.
        """

    def taken(self, source: str, to: str) -> None:
        """Note that `to` received a message of `source`: the window has room for another one."""

    async def more(self, changed: Notice) -> None:
        """Return when there may be more to receive; `changed` is the notice of the member that waits.

        Cancellation: only this wait ends.
        """

    def gather_nowait(self) -> None:
        """Put what is here now into the members' ends."""


class MemberChannel(Generic[Message]):
    """A Channel; made by the `open` of LocalChannels, LinkChannels, FabricChannels or StoreChannels.

    Attributes:
        name: of the member.
        refused: messages that came and were none; dropped and logged.
    """

    def __init__(self, name: str, carrier: Carrier, codec: Codec[Message]) -> None:
        """Not for users."""
        self.name = name
        self.refused: int = 0
        self._carrier = carrier
        self._codec = codec
        self._items: deque[tuple[str, Message | PeerFound | PeerLost]] = deque()
        self._present: set[str] = set()
        self._untaken: Counter[str] = Counter()
        self._turns: dict[str, anyio.Lock] = {}
        self._changed = Notice()
        self._ended = False

    async def send(self, to: str, message: Message) -> None:
        """Send a message; see Channel.

        Cancellation: the message has left whole or not at all.
        """
        data = self._codec.encode(message)
        async with self._turns.setdefault(to, anyio.Lock()):
            if self._ended:
                raise ClosedError(f"the channel of {self.name} is closed")
            await self._carrier.carry(self.name, to, data)

    async def receive(self) -> tuple[str, Message | PeerFound | PeerLost]:
        """Return the next message or change; see Channel.

        Cancellation: nothing is lost.
        """
        await checkpoint()
        while not self._items:
            if self._ended:
                raise ClosedError(f"the channel of {self.name} is closed")
            await self._carrier.more(self._changed)
        return self._next()

    def take_nowait(self) -> list[tuple[str, Message | PeerFound | PeerLost]]:
        """Return what is there already, perhaps nothing."""
        self._carrier.gather_nowait()
        return [self._next() for _ in range(len(self._items))]

    async def aclose(self) -> None:
        """Leave; see Channel.

        Cancellation: the peers find out as if the process had died.
        """
        if not self._ended:
            self.end()
            await self._carrier.leave(self.name)

    def __aiter__(self) -> MemberChannel[Message]:
        return self

    async def __anext__(self) -> tuple[str, Message | PeerFound | PeerLost]:
        try:
            return await self.receive()
        except ClosedError:
            raise StopAsyncIteration from None

    # ---- what carriers call

    def put(self, source: str, data: bytes) -> None:
        """Add a message to what is received; dropped when there is no session with its source, or no message in it."""
        if self._ended or source not in self._present:
            return
        try:
            message = self._codec.decode(data)
        except RemoteProtocolError as error:
            self.refused += 1
            logger.warning("%s sent %s what is no message: %s", source, self.name, error)
            self._carrier.taken(source, self.name)
            return
        self._untaken[source] += 1
        self._add(source, message)

    def find(self, peer: str) -> None:
        """Begin a session with a peer, unless there is one."""
        if not self._ended and peer not in self._present:
            self._present.add(peer)
            self._add(peer, PeerFound())

    def lose(self, peer: str, reason: str) -> None:
        """End the session with a peer, if there is one."""
        if not self._ended and peer in self._present:
            self._present.discard(peer)
            if peer in self._turns and not self._turns[peer].locked():
                del self._turns[peer]
            self._add(peer, PeerLost(reason))

    def end(self) -> None:
        """End the channel: nothing more comes."""
        self._ended = True
        self._changed.notify()

    def untaken(self, source: str) -> int:
        """Return how many messages of a source were not received."""
        return self._untaken[source]

    def _add(self, peer: str, event: Message | PeerFound | PeerLost) -> None:
        self._items.append((peer, event))
        self._changed.notify()

    def _next(self) -> tuple[str, Message | PeerFound | PeerLost]:
        peer, event = item = self._items.popleft()
        if not isinstance(event, PeerFound | PeerLost):
            self._untaken[peer] -= 1
            if not self._untaken[peer]:
                del self._untaken[peer]
            self._carrier.taken(peer, self.name)
        return item
