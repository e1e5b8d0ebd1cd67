"""FakeLink: control connections between nodes of one process, in memory, with loss of a peer on demand.

Runs on the event loop's thread. It keeps what `asyncfabric.actors.link` promises: order between two nodes, room
that senders wait for, a PeerError for the lost and the unknown; the tests of links run on it and on the real one.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import ObjectReceiveStream

from asyncfabric.control.messages import Identity
from asyncfabric.errors import BusyError, PeerError

T = TypeVar("T")
LARGEST_BODY = 1 << 20


@dataclass(frozen=True, slots=True)
class FakeArrival:
    """A message from a peer."""

    sender: Identity
    body: bytes
    trace: str | None


@dataclass(frozen=True, slots=True)
class FakeSessionChange:
    """What became of the session with a peer."""

    peer: Identity
    state: Literal["ready", "draining", "lost"]
    reason: str


class FakeLinkNetwork:
    """Where fake links find each other. `room` is how many messages of one sender wait before it waits."""

    def __init__(self, room: int = 16) -> None:
        """Make an empty network."""
        self._room = room
        self._links: dict[str, FakeLink] = {}
        self._incarnations = itertools.count(1)

    def link(self, name: str) -> FakeLink:
        """Return a new life of a node of this name; an earlier one is lost to its peers."""
        address = f"fake://{name}"
        if address in self._links:
            self.lose(self._links[address], "its successor came")
        link = FakeLink(self, Identity(name, next(self._incarnations)), address, self._room)
        self._links[address] = link
        return link

    def lose(self, link: FakeLink, reason: str = "it was lost on demand") -> None:
        """Let a node disappear without a word: its peers learn of it, it of them, and nothing passes any more."""
        if self._links.get(link.address) is link:
            del self._links[link.address]
        for peer in list(link._peers.values()):
            link._part(peer, reason)

    def cut(self, one: FakeLink, other: FakeLink, reason: str = "the network was cut") -> None:
        """Part two nodes; both learn of it, both live on, and they can connect again."""
        one._part(other, reason)

    def _at(self, address: str) -> FakeLink | None:
        return self._links.get(address)


class FakeLink:
    """One node's end of the network; made by `FakeLinkNetwork.link`."""

    def __init__(self, network: FakeLinkNetwork, identity: Identity, address: str, room: int) -> None:
        """Not for users."""
        self.identity = identity
        self.address = address
        self._network = network
        self._room = room
        self._peers: dict[Identity, FakeLink] = {}
        self._inboxes: dict[str, _Queue[FakeArrival]] = {}
        self._listening: set[str] = set()
        self._watchers: list[_Queue[FakeSessionChange]] = []
        self._lines: dict[tuple[Identity, str], anyio.Lock] = {}

    async def connect(self, address: str) -> Identity:
        """Connect to a peer; both sides see it ready. Raises PeerError when nobody is there."""
        await anyio.lowlevel.checkpoint()
        peer = self._network._at(address)
        if peer is None or self._network._at(self.address) is not self:
            raise PeerError(f"nobody is at {address}, or we are lost")
        if peer.identity not in self._peers:
            for one, other in ((self, peer), (peer, self)):
                one._peers[other.identity] = other
                one._notify(FakeSessionChange(other.identity, "ready", "connected"))
        return peer.identity

    async def send(self, to: Identity, channel: str, body: bytes, trace: str | None = None) -> None:
        """Send to a peer; waits for room there. Raises PeerError when the peer is lost or unknown.

        Cancellation: nothing was sent.
        """
        if not isinstance(body, bytes):
            raise TypeError(f"body must be bytes, got {type(body).__name__}")
        if len(body) > LARGEST_BODY:
            raise ValueError(f"body has {len(body)} bytes, {to} takes {LARGEST_BODY}")
        await anyio.lowlevel.checkpoint()
        async with self._lines.setdefault((to, channel), anyio.Lock()):  # senders of one channel keep their order
            peer = self._connected(to)
            inbox = peer._inbox(channel)
            while sum(arrival.sender == self.identity for arrival in inbox.items) >= self._room:
                await inbox.change()
                self._connected(to)
            inbox.put(FakeArrival(self.identity, body, trace))

    @asynccontextmanager
    async def listen(self, channel: str) -> AsyncIterator[ObjectReceiveStream[FakeArrival]]:
        """Receive what peers send on a channel, what came before included. Raises BusyError for a second listener."""
        if channel in self._listening:
            raise BusyError(f"channel {channel!r} is listened to already")
        self._listening.add(channel)
        try:
            yield self._inbox(channel)
        finally:
            self._listening.remove(channel)

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[ObjectReceiveStream[FakeSessionChange]]:
        """Receive what becomes of sessions; those that are ready now come first."""
        changes: _Queue[FakeSessionChange] = _Queue()
        for peer in self._peers:
            changes.put(FakeSessionChange(peer, "ready", "present state"))
        self._watchers.append(changes)
        try:
            yield changes
        finally:
            self._watchers.remove(changes)

    async def disconnect(self, peer: Identity) -> None:
        """End the session with a peer; both sides learn of it."""
        await anyio.lowlevel.checkpoint()
        other = self._peers.get(peer)
        if other is not None:
            self._part(other, "left")

    def _connected(self, to: Identity) -> FakeLink:
        peer = self._peers.get(to)
        if peer is None:
            raise PeerError(f"{to} is lost or was never connected")
        return peer

    def _inbox(self, channel: str) -> _Queue[FakeArrival]:
        return self._inboxes.setdefault(channel, _Queue())

    def _part(self, peer: FakeLink, reason: str) -> None:
        for one, other in ((self, peer), (peer, self)):
            if one._peers.pop(other.identity, None) is not None:
                one._notify(FakeSessionChange(other.identity, "lost", reason))
            for inbox in one._inboxes.values():
                inbox.wake()  # who waits for room looks again

    def _notify(self, change: FakeSessionChange) -> None:
        for watcher in self._watchers:
            watcher.put(change)


class _Queue(ObjectReceiveStream[T], Generic[T]):
    """What waits for one receiver."""

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        self._changed = anyio.Event()

    def put(self, item: T) -> None:
        self.items.append(item)
        self.wake()

    def wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def change(self) -> None:
        await self._changed.wait()

    async def receive(self) -> T:
        await anyio.lowlevel.checkpoint()
        while not self.items:
            await self.change()
        item = self.items.popleft()
        self.wake()
        return item

    async def aclose(self) -> None:
        await anyio.lowlevel.checkpoint()
