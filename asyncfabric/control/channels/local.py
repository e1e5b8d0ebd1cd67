"""LocalChannels: channels between members of one process and one event loop, for tests and for examples.

Messages go through their codec, as over any other carrier.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from asyncfabric._notice import Notice
from asyncfabric.control.channels.channel import WINDOW, Codec
from asyncfabric.control.channels.member import MemberChannel
from asyncfabric.errors import PeerError

Message = TypeVar("Message")


class LocalChannels(Generic[Message]):
    """The members of one process; every member has a session with every other one."""

    def __init__(self, codec: Codec[Message], *, window: int = WINDOW) -> None:
        """Carry the messages of a codec.

        Raises:
            ValueError: window is not positive.
        """
        if window < 1:
            raise ValueError(f"window must be at least 1 message, got {window}")
        self._codec = codec
        self._window = window
        self._members: dict[str, MemberChannel[Message]] = {}
        self._room = Notice()

    def open(self, name: str) -> MemberChannel[Message]:
        """Return the channel of a member, with sessions to all who are there.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._members:
            raise ValueError(f"{name!r} is there already")
        mine = MemberChannel(name, self, self._codec)
        for other, channel in self._members.items():
            channel.find(name)
            mine.find(other)
        self._members[name] = mine
        return mine

    def close(self, name: str, reason: str = "it was closed") -> None:
        """End a member: everybody loses it."""
        self._members.pop(name).end()
        for channel in self._members.values():
            channel.lose(name, reason)
        self._room.notify()

    def renew(self, one: str, other: str, reason: str = "the link broke") -> None:
        """Break the session of two members and begin a new one at once."""
        for name, peer in ((one, other), (other, one)):
            self._members[name].lose(peer, reason)
            self._members[name].find(peer)

    def deliver(self, source: str, to: str, data: bytes) -> None:
        """Put the bytes of a message where `to` receives them, whether its window has room or not.

        Raises:
            PeerError: it is not there.
        """
        self._member(to).put(source, data)

    # ---- Carrier

    async def carry(self, source: str, to: str, data: bytes) -> None:
        """Deliver once the recipient's window has room; see Carrier.

        Cancellation: the message did not leave.
        """
        while self._member(to).untaken(source) >= self._window:
            await self._room.wait()
        self.deliver(source, to, data)

    async def leave(self, name: str) -> None:
        """End a member; see Carrier.

        Cancellation: does not wait.
        """
        if name in self._members:
            self.close(name)

    def taken(self, source: str, to: str) -> None:
        """Let senders look again."""
        self._room.notify()

    async def more(self, changed: Notice) -> None:
        """Wait for a change.

        Cancellation: only this wait ends.
        """
        await changed.wait()

    def gather_nowait(self) -> None:
        """Everything is there already."""

    def _member(self, name: str) -> MemberChannel[Message]:
        if name not in self._members:
            raise PeerError(f"{name} is not there", remedy="is its process alive?")
        return self._members[name]
