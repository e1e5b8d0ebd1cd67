"""FakeLink: control connections between nodes of one process, in memory, with loss of a peer on demand.

Runs on the event loop's thread. It keeps what `asyncfabric._orchestration.link` promises: order between two nodes, room
that senders wait for, a PeerError for the lost and the unknown; the tests of links run on it and on the real one.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from asyncfabric._orchestration.link import Identity
from asyncfabric.errors import PeerError


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
    """Where fake links find each other. `room` is how many messages wait at a listener before senders wait."""

    def __init__(self, room: int = 16) -> None:
        """Make an empty network."""
        self._room = room
        self._links: dict[str, FakeLink] = {}

    def link(self, name: str) -> FakeLink:
        """Return a new life of a node of this name; an earlier one is lost to its peers."""
        address = f"fake://{name}"
        if address in self._links:
            self.lose(self._links[address], "its successor came")
        link = self._links[address] = FakeLink(self, Identity(name, secrets.randbits(63) or 1), address, self._room)
        return link

    def lose(self, link: FakeLink, reason: str = "it was lost on demand") -> None:
        """Let a node disappear without a word: its peers hear of it, it hears of them, and nothing passes any more."""
        if self._links.get(link.address) is link:
            del self._links[link.address]
        for peer in list(link._peers.values()):
            link._part(peer, reason)

    def partition(self, one: FakeLink, other: FakeLink, reason: str = "the network was cut") -> None:
        """Part two nodes; both hear of it and both live on."""
        one._part(other, reason)

    def _at(self, address: str) -> FakeLink | None:
        return self._links.get(address)


class FakeLink:
    """One node's end of the network; made by `FakeLinkNetwork.link`."""

    def __init__(self, network: FakeLinkNetwork, identity: Identity, address: str, room: int) -> None:
        """Not for users."""
        self.identity = identity
        self.address = address
        self.unheard = 0  # messages on channels that nobody listens to
        self._network = network
        self._room = room
        self._peers: dict[Identity, FakeLink] = {}
        self._listeners: dict[str, MemoryObjectSendStream[FakeArrival]] = {}
        self._watchers: list[MemoryObjectSendStream[FakeSessionChange]] = []
        self._parted: dict[Identity, anyio.Event] = {}

    async def connect(self, address: str) -> Identity:
        """Connect to a peer; both sides see it ready. Raises PeerError when nobody is there."""
        await anyio.lowlevel.checkpoint()
        peer = self._network._at(address)
        if peer is None:
            raise PeerError(f"nobody is at {address}")
        if peer.identity not in self._peers:
            for one, other in ((self, peer), (peer, self)):
                one._peers[other.identity] = other
                one._parted[other.identity] = anyio.Event()
                one._tell(FakeSessionChange(other.identity, "ready", "connected"))
        return peer.identity

    async def send(self, to: Identity, channel: str, body: bytes, trace: str | None = None) -> None:
        """Send to a peer; waits for room there. Raises PeerError when the peer is lost or unknown.

        Cancellation: the message was not sent.
        """
        await anyio.lowlevel.checkpoint()
        peer = self._peers.get(to)
        if peer is None:
            raise PeerError(f"{to} is lost or was never connected")
        listener = peer._listeners.get(channel)
        if listener is None:
            peer.unheard += 1
            return
        try:
            listener.send_nowait(FakeArrival(self.identity, bytes(body), trace))
        except anyio.WouldBlock:
            await self._send_with_patience(peer, listener, FakeArrival(self.identity, bytes(body), trace))
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            peer.unheard += 1

    @asynccontextmanager
    async def listen(self, channel: str) -> AsyncIterator[MemoryObjectReceiveStream[FakeArrival]]:
        """Receive what peers send on a channel. Raises ValueError when somebody listens already."""
        if channel in self._listeners:
            raise ValueError(f"channel {channel!r} is listened to already")
        sender, receiver = anyio.create_memory_object_stream[FakeArrival](self._room)
        self._listeners[channel] = sender
        try:
            with sender, receiver:
                yield receiver
        finally:
            del self._listeners[channel]

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[MemoryObjectReceiveStream[FakeSessionChange]]:
        """Receive what becomes of sessions; those that are ready now come first."""
        # As many changes as a test makes: a bounded stream would make losing a peer wait for whoever watches.
        sender, receiver = anyio.create_memory_object_stream[FakeSessionChange](float("inf"))
        for peer in self._peers:
            sender.send_nowait(FakeSessionChange(peer, "ready", "connected"))
        self._watchers.append(sender)
        try:
            with sender, receiver:
                yield receiver
        finally:
            self._watchers.remove(sender)

    async def disconnect(self, peer: Identity) -> None:
        """End the session with a peer; both sides hear of it."""
        await anyio.lowlevel.checkpoint()
        other = self._peers.get(peer)
        if other is not None:
            self._part(other, "disconnected")

    async def _send_with_patience(
        self, peer: FakeLink, listener: MemoryObjectSendStream[FakeArrival], arrival: FakeArrival
    ) -> None:
        parted = self._parted[peer.identity]
        lost = False

        async def give_up() -> None:
            nonlocal lost
            await parted.wait()
            lost = True
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(give_up)
            try:
                await listener.send(arrival)
            except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                peer.unheard += 1
            tasks.cancel_scope.cancel()
        if lost:
            raise PeerError(f"{peer.identity} was lost while a message waited for room")

    def _part(self, peer: FakeLink, reason: str) -> None:
        for one, other in ((self, peer), (peer, self)):
            if one._peers.pop(other.identity, None) is not None:
                one._parted.pop(other.identity).set()
                one._tell(FakeSessionChange(other.identity, "lost", reason))

    def _tell(self, change: FakeSessionChange) -> None:
        for watcher in self._watchers:
            watcher.send_nowait(change)
