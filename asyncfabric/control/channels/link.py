"""LinkChannels: channels over control links: which member is on which node, sessions, long messages in parts.

Event loop's thread. A node reports its members (`MembersHere`) whenever a session of its link begins, and when they
change; the peers are found before any message of that session and lost at its end. Each side numbers its sessions,
and what comes under an earlier number is dropped, so nothing crosses sessions even when the loss and the new beginning
are noticed late. A member that does not receive stops, by the window, the senders of the nodes that send to it.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import anyio
import msgspec

from asyncfabric._groups import unwrapped
from asyncfabric._notice import Notice
from asyncfabric.control.channels.channel import WINDOW, Codec
from asyncfabric.control.channels.member import MemberChannel
from asyncfabric.control.directory import NodeChange
from asyncfabric.control.directory_client import DirectoryClient
from asyncfabric.control.events import Arrival
from asyncfabric.control.link import Link
from asyncfabric.control.messages import Identity
from asyncfabric.errors import PeerError
from asyncfabric.unreadable import UNREADABLE

PART_BYTES = 512 << 10
REDIAL_S = 0.2

logger: logging.Logger = logging.getLogger("asyncfabric.control")

Message = TypeVar("Message")


class MembersHere(msgspec.Struct, frozen=True, tag="here"):
    """Which members are on the sender's node.

    Attributes:
        session: the sender's number of this session.
        seen: the receiver's number as the sender knows it, 0 for none; if it is not the present one it is sent again.
        names: of the members.
    """

    session: int
    seen: int
    names: list[str]


class MessagePart(msgspec.Struct, frozen=True, tag="part"):
    """A message, or a part of one; the parts of a message follow each other.

    Attributes:
        session: the sender's number, as in MembersHere.
        source, to: members.
        last: whether the message is complete now.
        data: of the message.
    """

    session: int
    source: str
    to: str
    last: bool
    data: bytes


_decoder = msgspec.msgpack.Decoder(MembersHere | MessagePart)
_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class _NodeSession:
    """A session with a node. `early`: it spoke before the link reported the session as ready."""

    mine: int
    early: bool = False
    theirs: int = 0
    names: set[str] = field(default_factory=set)
    parts: dict[tuple[str, str], bytearray] = field(default_factory=dict)


class LinkChannels(Generic[Message]):
    """The members of this node, and those of others as far as there are sessions.

    Members of one node do not see each other.
    """

    def __init__(self, link: Link, codec: Codec[Message], *, channel: str = "channel", window: int = WINDOW) -> None:
        """Carry the messages of a codec on one channel of a link, the same on all nodes.

        Raises:
            ValueError: window is not positive.
        """
        if window < 1:
            raise ValueError(f"window must be at least 1 message, got {window}")
        self._link = link
        self._codec = codec
        self._channel = channel
        self._window = window
        self._members: dict[str, MemberChannel[Message]] = {}
        self._sessions: dict[Identity, _NodeSession] = {}
        self._where: dict[str, Identity] = {}
        self._nodes: dict[Identity, anyio.CancelScope] = {}
        self._ready: set[Identity] = set()
        self._room = Notice()

    def open(self, name: str) -> MemberChannel[Message]:
        """Return the channel of a member of this node; open all before `run`.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._members:
            raise ValueError(f"{name!r} is there already")
        mine = self._members[name] = MemberChannel(name, self, self._codec)
        return mine

    @property
    def known(self) -> dict[str, str]:
        """Return the node of each peer that there is a session with."""
        return {name: identity.name for name, identity in sorted(self._where.items())}

    async def run(self, directory: DirectoryClient, roles: tuple[str, ...]) -> None:
        """Have sessions with all nodes of these roles that are in the directory, for ever.

        Cancellation: the channels end.
        """
        try:
            with unwrapped():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._listen)
                    tasks.start_soon(self._watch)
                    while True:  # a watch that fell too far behind ends, and a new one begins with the present state
                        async with directory.watch() as changes:
                            async for change in changes:
                                self._take_change(change, roles, tasks)
        finally:
            for member in self._members.values():
                member.end()

    # ---- Carrier

    async def carry(self, source: str, to: str, data: bytes) -> None:
        """Send the bytes of a message; see Carrier.

        Cancellation: before its first part nothing was sent; then the rest goes all the same.
        """
        identity = self._where.get(to)
        node = self._sessions.get(identity) if identity is not None else None
        if identity is None or node is None:
            raise PeerError(f"there is no session with {to}", remedy="is its process alive and in the directory?")
        session = node.mine
        for begin in range(0, max(1, len(data)), PART_BYTES):
            last = begin + PART_BYTES >= len(data)
            part = MessagePart(session, source, to, last, data[begin : begin + PART_BYTES])
            with anyio.CancelScope(shield=begin > 0):
                await self._link.send(identity, self._channel, _encode(part))

    async def leave(self, name: str) -> None:
        """Report to every node that a member is gone; see Carrier.

        Cancellation: some nodes may not know.
        """
        if self._members.pop(name, None) is not None:
            for identity in list(self._sessions):
                await self._report(identity)

    def taken(self, source: str, to: str) -> None:
        """Let the listener look again."""
        self._room.notify()

    async def more(self, changed: Notice) -> None:
        """Wait for a change.

        Cancellation: only this wait ends.
        """
        await changed.wait()

    def gather_nowait(self) -> None:
        """Everything is there already."""

    # ---- sessions

    def _take_change(self, change: NodeChange, roles: tuple[str, ...], tasks: anyio.abc.TaskGroup) -> None:
        identity = change.node.identity
        if change.kind in ("left", "lost"):
            if (scope := self._nodes.pop(identity, None)) is not None:
                scope.cancel()
        elif (
            change.kind != "draining"
            and change.node.role in roles
            and identity not in self._nodes
            and identity != self._link.identity
        ):
            self._nodes[identity] = anyio.CancelScope()
            tasks.start_soon(self._keep, identity, change.node.address, self._nodes[identity])
            if identity in self._ready and identity not in self._sessions:
                tasks.start_soon(self._greet, identity)

    async def _keep(self, identity: Identity, address: str, scope: anyio.CancelScope) -> None:
        with scope:
            while True:
                try:
                    await self._link.connect(address)
                except PeerError as error:
                    logger.info("no session with %s yet: %s", identity.name, error)
                await anyio.sleep(REDIAL_S)

    async def _watch(self) -> None:
        while True:  # as in `run`
            async with self._link.watch() as changes:
                async for change in changes:
                    if change.state == "ready":
                        await self._begin(change.peer)
                    elif change.state == "lost" and all(one.identity != change.peer for one in self._link.peers()):
                        self._ready.discard(change.peer)
                        self._end(change.peer, change.reason)

    async def _begin(self, identity: Identity) -> None:
        self._ready.add(identity)
        node = self._sessions.get(identity)
        if node is not None and node.early:
            node.early = False
            return
        if node is not None:  # the link did not report its loss apart from this beginning
            self._end(identity, "its session began anew")
        if identity in self._nodes:
            await self._greet(identity)

    async def _greet(self, identity: Identity) -> None:
        self._sessions.setdefault(identity, _NodeSession(_number()))
        await self._report(identity)

    async def _report(self, identity: Identity) -> None:
        node = self._sessions.get(identity)
        if node is None:
            return
        here = MembersHere(node.mine, node.theirs, list(self._members))
        try:
            await self._link.send(identity, self._channel, _encode(here))
        except PeerError as error:
            logger.info("%s was not sent who is here: %s", identity.name, error)

    async def _listen(self) -> None:
        async with self._link.listen(self._channel) as arrivals:
            async for arrival in arrivals:
                try:
                    message = _decoder.decode(arrival.body)
                except UNREADABLE as error:
                    logger.warning("%s sent what is no message of a channel: %s", arrival.sender.name, error)
                    continue
                if isinstance(message, MembersHere):
                    await self._take_here(arrival.sender, message)
                else:
                    await self._take_part(arrival, message)

    async def _take_here(self, identity: Identity, here: MembersHere) -> None:
        node = self._sessions.get(identity)
        if node is not None and node.theirs not in (0, here.session):
            self._end(identity, "it began a new session")
            node = None
        if node is None:
            node = self._sessions[identity] = _NodeSession(_number(), early=identity not in self._ready)
        node.theirs = here.session
        if here.seen != node.mine:
            await self._report(identity)  # before any member here can send to them
        self._meet(identity, node, set(here.names))

    async def _take_part(self, arrival: Arrival, part: MessagePart) -> None:
        while (member := self._members.get(part.to)) is not None and member.untaken(part.source) >= self._window:
            await self._room.wait()
        node = self._sessions.get(arrival.sender)  # after the wait: the session may have ended meanwhile
        if member is None or node is None or node.theirs != part.session or part.source not in node.names:
            return
        whole = node.parts.setdefault((part.source, part.to), bytearray())
        whole += part.data
        if part.last:
            del node.parts[part.source, part.to]
            member.put(part.source, bytes(whole))

    def _meet(self, identity: Identity, node: _NodeSession, names: set[str]) -> None:
        for name in sorted(node.names - names):
            self._lose(name, identity, "it ended")
        for name in sorted(names - node.names):
            if name in self._where:
                self._lose(name, self._where[name], "it is somewhere else now")
            self._where[name] = identity
            for member in self._members.values():
                member.find(name)
        node.names = names

    def _end(self, identity: Identity, reason: str) -> None:
        node = self._sessions.pop(identity, None)
        for name in node.names if node is not None else ():
            self._lose(name, identity, reason)
        self._room.notify()

    def _lose(self, name: str, identity: Identity, reason: str) -> None:
        if self._where.get(name) != identity:
            return
        del self._where[name]
        where = "" if name.startswith(f"{identity.name}/") else f" (it was on node {identity.name})"
        for member in self._members.values():
            member.lose(name, reason + where)


def _number() -> int:
    return secrets.randbits(62) | 1
