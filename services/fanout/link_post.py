"""The Messenger of weight updates over control links: who is at which node, sessions, messages in parts.

On the event loop. A node tells who lives on it (`Here`) whenever a session of its link begins; participants hear Found
before any message of that session and Lost at its end. Each side numbers its sessions, and what came under an earlier
number is dropped, so nothing is heard across sessions even when the loss and the new beginning are noticed late.
"""

from __future__ import annotations

import logging
import math
import secrets
from dataclasses import dataclass, field

import anyio
import msgspec
import trio

from asyncfabric.actors import Gone, Joined, MemberChange
from asyncfabric.control import Arrival, DirectoryClient, Identity, Link
from asyncfabric.errors import ClosedError, PeerError, RemoteProtocolError
from asyncfabric.weights.update import Found, Lost, WeightMessage, decode_message, encode_message
from asyncfabric_services.nodes.members import follow

CHANNEL = "weights"
PART_BYTES = 512 << 10
REDIAL_SECONDS = 0.2

_log = logging.getLogger(__name__)


class Here(msgspec.Struct, frozen=True, tag="here"):
    """Who lives on the sender's node.

    Attributes:
        session: the sender's number of this session.
        seen: the receiver's number as the sender knows it, 0 for none; if it is not the present one it is told again.
        names: participants.
    """

    session: int
    seen: int
    names: list[str]


class Part(msgspec.Struct, frozen=True, tag="part"):
    """A message, or a part of one; the parts of a message follow each other.

    Attributes:
        session: the sender's number, as in Here.
        source, to: participants.
        last: whether the message is complete now.
        data: of the message.
    """

    session: int
    source: str
    to: str
    last: bool
    data: bytes


_decoder = msgspec.msgpack.Decoder(Here | Part)
_encode = msgspec.msgpack.Encoder().encode
Event = WeightMessage | Found | Lost


@dataclass(slots=True)
class _Peer:
    """A node that there is a session with. `early`: it spoke before we were told that the session is ready."""

    mine: int
    early: bool = False
    theirs: int = 0
    names: set[str] = field(default_factory=set)
    parts: dict[tuple[str, str], bytearray] = field(default_factory=dict)


class LinkMessenger:
    """The messenger of one participant; made by `LinkPost.open`."""

    def __init__(self, post: LinkPost, name: str) -> None:
        self.name = name
        self._post = post
        self._put, self._take = anyio.create_memory_object_stream[tuple[str, Event]](math.inf)
        self._turns: dict[str, anyio.Lock] = {}

    async def send(self, to: str, message: WeightMessage) -> None:
        """Send a message; raises PeerError when there is no session with `to`.

        Cancellation: the message may have left, whole or not at all.
        """
        turn = self._turns.setdefault(to, anyio.Lock())
        async with turn:
            await self._post.send(self.name, to, encode_message(message))

    async def receive(self) -> tuple[str, Event]:
        """Return what comes next; raises ClosedError at the end.

        Cancellation: nothing is lost.
        """
        try:
            return await self._take.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            raise ClosedError(f"the messenger of {self.name} is closed") from None

    def take_nowait(self) -> list[tuple[str, Event]]:
        """Return what is there already."""
        found: list[tuple[str, Event]] = []
        try:
            while True:
                found.append(self._take.receive_nowait())
        except (anyio.WouldBlock, anyio.EndOfStream, anyio.ClosedResourceError):
            return found

    def put(self, source: str, event: Event) -> None:
        """Add to what is received; not for users."""
        self._put.send_nowait((source, event))

    def end(self) -> None:
        """Close both ends; not for users."""
        self._put.close()
        self._take.close()


class LinkPost:
    """The participants of this node, and those of others as far as there are sessions."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._boxes: dict[str, LinkMessenger] = {}
        self._peers: dict[Identity, _Peer] = {}
        self._where: dict[str, Identity] = {}
        self._members: dict[Identity, trio.CancelScope] = {}
        self._ready: set[Identity] = set()

    def open(self, name: str) -> LinkMessenger:
        """Return the messenger of a participant of this node; open all before `run`."""
        box = self._boxes[name] = LinkMessenger(self, name)
        return box

    @property
    def known(self) -> dict[str, str]:
        """Return the node of each participant that there is a session with."""
        return {name: identity.name for name, identity in sorted(self._where.items())}

    async def run(self, directory: DirectoryClient, roles: tuple[str, ...]) -> None:
        """Have sessions with all nodes of these roles that are in the directory, for ever.

        Cancellation: the messengers end.
        """
        try:
            async with trio.open_nursery() as nursery:

                def take(change: MemberChange) -> None:
                    if isinstance(change, Gone) and (scope := self._members.pop(change.identity, None)):
                        scope.cancel()
                    elif isinstance(change, Joined) and change.member.role in roles:
                        identity = change.member.identity
                        if identity not in self._members and identity != self._link.identity:
                            self._members[identity] = trio.CancelScope()
                            nursery.start_soon(self._keep, identity, change.member.address, self._members[identity])
                            if identity in self._ready and identity not in self._peers:
                                nursery.start_soon(self._greet, identity)

                nursery.start_soon(self._listen)
                nursery.start_soon(self._watch)
                await follow(directory, take)
        finally:
            for box in self._boxes.values():
                box.end()

    async def send(self, source: str, to: str, data: bytes) -> None:
        """Send the bytes of a message; see LinkMessenger.send.

        Cancellation: before its first part nothing was sent; then the rest goes all the same.
        """
        identity = self._where.get(to)
        peer = self._peers.get(identity) if identity is not None else None
        if identity is None or peer is None:
            raise PeerError(f"there is no session with {to}", remedy="is its process alive and in the directory?")
        session = peer.mine
        for begin in range(0, max(1, len(data)), PART_BYTES):
            last = begin + PART_BYTES >= len(data)
            part = Part(session, source, to, last, data[begin : begin + PART_BYTES])
            with trio.CancelScope(shield=begin > 0):
                await self._link.send(identity, CHANNEL, _encode(part))

    # ---- sessions

    async def _keep(self, identity: Identity, address: str, scope: trio.CancelScope) -> None:
        with scope:
            while True:
                try:
                    await self._link.connect(address)
                except PeerError as error:
                    _log.info("no session with %s yet: %s", identity.name, error)
                await trio.sleep(REDIAL_SECONDS)

    async def _watch(self) -> None:
        while True:  # a watch that fell too far behind ends, and a new one begins with the present state
            async with self._link.watch() as changes:
                async for change in changes:
                    if change.state == "ready":
                        await self._begins(change.peer)
                    elif change.state == "lost" and all(one.identity != change.peer for one in self._link.peers()):
                        self._ready.discard(change.peer)
                        self._lost(change.peer, change.reason)

    async def _begins(self, identity: Identity) -> None:
        self._ready.add(identity)
        peer = self._peers.get(identity)
        if peer is not None and peer.early:
            peer.early = False
            return
        if peer is not None:  # its loss was not told apart from this beginning
            self._lost(identity, "its session began anew")
        if identity in self._members:
            await self._greet(identity)

    async def _greet(self, identity: Identity) -> None:
        self._peers.setdefault(identity, _Peer(_number()))
        await self._tell(identity)

    async def _tell(self, identity: Identity) -> None:
        peer = self._peers[identity]
        try:
            await self._link.send(identity, CHANNEL, _encode(Here(peer.mine, peer.theirs, list(self._boxes))))
        except PeerError as error:
            _log.info("%s did not hear who is here: %s", identity.name, error)

    async def _listen(self) -> None:
        async with self._link.listen(CHANNEL) as arrivals:
            async for arrival in arrivals:
                try:
                    await self._take(arrival)
                except (msgspec.DecodeError, RemoteProtocolError) as error:
                    _log.warning("%s sent what is no message of an update: %s", arrival.sender.name, error)

    async def _take(self, arrival: Arrival) -> None:
        message = _decoder.decode(arrival.body)
        peer = self._peers.get(arrival.sender)
        if isinstance(message, Here):
            if peer is not None and peer.theirs not in (0, message.session):
                self._lost(arrival.sender, "it began a new session")
                peer = None
            if peer is None:
                peer = self._peers[arrival.sender] = _Peer(_number(), early=arrival.sender not in self._ready)
            peer.theirs = message.session
            if message.seen != peer.mine:
                await self._tell(arrival.sender)  # before anybody here can speak to them
            self._meet(arrival.sender, peer, set(message.names))
        elif peer is not None and peer.theirs == message.session and message.to in self._boxes:
            whole = peer.parts.setdefault((message.source, message.to), bytearray())
            whole += message.data
            if message.last:
                del peer.parts[message.source, message.to]
                self._boxes[message.to].put(message.source, decode_message(bytes(whole)))

    def _meet(self, identity: Identity, peer: _Peer, names: set[str]) -> None:
        for name in sorted(peer.names - names):
            self._gone(name, identity, "it ended")
        for name in sorted(names - peer.names):
            if name in self._where:
                self._gone(name, self._where[name], "it is somewhere else now")
            self._where[name] = identity
            for box in self._boxes.values():
                box.put(name, Found())
        peer.names = names

    def _lost(self, identity: Identity, reason: str) -> None:
        peer = self._peers.pop(identity, None)
        for name in peer.names if peer is not None else ():
            self._gone(name, identity, reason)

    def _gone(self, name: str, identity: Identity, reason: str) -> None:
        if self._where.get(name) != identity:
            return
        del self._where[name]
        at = "" if name.startswith(f"{identity.name}/") else f" (it was on node {identity.name})"
        for box in self._boxes.values():
            box.put(name, Lost(reason + at))


def _number() -> int:
    return secrets.randbits(62) | 1
