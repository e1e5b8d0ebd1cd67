"""FabricSessions: which peer of a fabric carries which member, and when sessions with it begin and end.

Event loop's thread. Members are known beforehand, with their addresses; one that is lost then does not come back. Or
each is named by its address, and sessions begin with whoever is sent to or sends. A session is then one connection of
the two fabrics: the next connection begins a new one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

import anyio
from anyio.abc import TaskGroup

from asyncfabric._groups import unwrapped
from asyncfabric._notice import Notice
from asyncfabric.control.channels.pieces import TAKEN, MessagePiece
from asyncfabric.errors import PeerError

NEVER = 1 << 62
LAST_MESSAGES_S = 0.2
"""How long after the loss of a peer its last messages may still be read."""

logger: logging.Logger = logging.getLogger("asyncfabric.control")


class MessageFabric(Protocol):
    """What is used of a fabric; asyncfabric.Fabric has it."""

    @property
    def address(self) -> Any:
        """Return where peers reach it."""

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


class FabricSessions:
    """The sessions of the members of one process.

    Attributes:
        peers: what carries the members with which there are sessions, as far as they were used.
    """

    def __init__(
        self,
        fabric: MessageFabric,
        addresses: Mapping[str, Any] | Callable[[str], Any],
        changed: Notice,
        on_found: Callable[[str], None],
        on_lost: Callable[[str, str], None],
    ) -> None:
        """Have sessions with the members of `addresses`, or with whoever has a name that it reads."""
        self.peers: dict[str, Any] = {}
        self._fabric = fabric
        self._read_name = addresses if callable(addresses) else None
        self._addresses: dict[str, Any] = {} if callable(addresses) else dict(addresses)
        self._named: dict[int, str] = {}  # where names are read: the present sessions, by incarnation
        self._barred: dict[int, int] = {}  # connections of which nothing is received any more, by incarnation
        self._lost: dict[str, str] = {}
        self._changed = changed
        self._on_found = on_found
        self._on_lost = on_lost
        self._watching: tuple[TaskGroup, Any] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the members of all processes; where names are read, those with a session."""
        return tuple(self._addresses)

    @property
    def present(self) -> tuple[str, ...]:
        """Return the members that were not lost."""
        return tuple(name for name in self._addresses if name not in self._lost)

    def admit(self, name: str, here: Collection[str]) -> None:
        """Check that a member may live here, beside others; raises ValueError otherwise."""
        if self._read_name is not None:
            if here:
                raise ValueError(f"{next(iter(here))!r} is there already, and a fabric has one member")
            address, own = self._read_name(name), self._fabric.address.incarnation
            if address.incarnation != own:
                raise ValueError(f"{name!r} is not the address of this fabric, {own:016x}")
            self._addresses[name], self._named[own] = address, name
        elif name not in self._addresses or name in here:
            why = "is there already" if name in here else "has no address"
            raise ValueError(f"{name!r} {why}")

    def leave(self, name: str) -> None:
        """End a member that lived here."""
        self._lost[name] = "it was closed"

    async def watch(self, watched: Iterable[str] | None, here: Collection[str]) -> None:
        """Connect to members, and notice the loss of them and of those whose sessions begin, for ever.

        Args:
            watched: members, None for all; those that live here are left out.
            here: members that live here.

        Cancellation: nothing is watched any more.
        """
        counter = self._fabric.counter()
        try:
            with unwrapped():
                async with anyio.create_task_group() as tasks:
                    self._watching = tasks, counter
                    for name in self.names if watched is None else watched:
                        if name in here:
                            continue
                        tasks.start_soon(self._watch, counter, name, self.peers.get(name))
                    await anyio.sleep_forever()
        finally:
            self._watching = None
            counter.close()

    def written(self, to: str) -> str:
        """Return the recipient of a piece; where a fabric has one member, it needs no name."""
        return to if self._read_name is None else ""

    def recipient(self, piece: MessagePiece, here: Collection[str]) -> str:
        """Return to whom a piece is; empty where nobody is left."""
        return piece.to if self._read_name is None else next(iter(here), "")

    def carries(self, name: str, peer: Any) -> bool:
        """Return whether a peer can carry a member's messages, as far as is known."""
        return self._read_name is None or (not peer.lost and self.peers.get(name) is peer)

    def bar(self, peer: Any) -> None:
        """Receive nothing more of this connection."""
        self._barred[peer.incarnation] = peer.id

    async def reach(self, to: str) -> tuple[str, Any]:
        """Return the name of a member in its session, and the peer; connects where that is needed."""
        if self._read_name is None:
            if to in self._lost or to not in self._addresses:
                raise self.no_session(to)
            if to not in self.peers:
                self.peers[to] = await self._fabric.connect(self._addresses[to])
            return to, self.peers[to]
        try:
            address = self._read_name(to)
        except ValueError as error:
            raise PeerError(f"there is no session with {to}: {error}", remedy="name members by their address") from None
        name = self._named.get(address.incarnation, to)
        if address.incarnation == self._fabric.address.incarnation:
            raise PeerError(f"there is no session with {name}: it is the sender", remedy="send to other members")
        peer = self.peers.get(name)
        if peer is None or peer.lost:
            peer = await self._fabric.connect(address)
            name = self._begin(to, address, peer)
        return name, peer

    def no_session(self, name: str) -> PeerError:
        """Return what a send to a member raises with which there is no session."""
        why = self._lost.get(name) or ("it ended" if self._read_name is not None else "it has no address")
        return PeerError(f"there is no session with {name}: {why}", remedy="is its process alive?")

    def sender(self, peer: Any, piece: MessagePiece, *, receives: bool) -> str | None:
        """Return who sent a piece; None for a stranger, or of a session that has ended.

        Where names are read its session begins, if there is a member that receives.
        """
        if self._read_name is None:
            address = self._addresses.get(piece.source)
            if address is None or address.incarnation != peer.incarnation or piece.source in self._lost:
                return None
            self.peers.setdefault(piece.source, peer)
            return piece.source
        name = self._named.get(peer.incarnation)
        known = None if name is None else self.peers.get(name)
        if name is not None and known is not None and known.id == peer.id:
            return name
        latest = self._barred.get(peer.incarnation, -1) if known is None else known.id
        if piece.kind == TAKEN or not receives or peer.id <= latest:
            return None
        try:
            address = self._read_name(piece.source)
        except ValueError as error:
            logger.warning("%r sent a message of %r: %s", peer, piece.source[:64], error)
            return None
        if address.incarnation != peer.incarnation or peer.incarnation == self._fabric.address.incarnation:
            logger.warning("%r sent a message of another fabric, %r", peer, address)
            return None
        return self._begin(piece.source, address, peer)

    def _begin(self, name: str, address: Any, peer: Any) -> str:
        """Begin a session with the member that a peer carries, unless it has begun; return its name there."""
        present = self._named.get(address.incarnation)
        if present is not None:
            if self.peers[present].id == peer.id:
                return present
            self.lose(present, "it connected anew")
        self._addresses[name], self.peers[name], self._named[address.incarnation] = address, peer, name
        self._on_found(name)
        if self._watching is not None:
            tasks, counter = self._watching
            tasks.start_soon(self._watch, counter, name, peer)
        return name

    async def _watch(self, counter: Any, name: str, peer: Any) -> None:
        try:
            if peer is None:
                _, peer = await self.reach(name)
            await counter.wait(NEVER, peers=[peer])
        except PeerError as error:
            with anyio.move_on_after(LAST_MESSAGES_S):  # what came before the loss may not have been read yet
                while self.peers.get(name) is peer and name not in self._lost:
                    await self._changed.wait()
            self.end(name, peer, str(error))

    def end(self, name: str, peer: Any, reason: str) -> None:
        """Lose a member whose peer is lost, unless it is in a later session."""
        if self._read_name is None or self.peers.get(name) is peer:
            self.lose(name, reason)

    def lose(self, name: str, reason: str) -> None:
        """End the session with a member; where names are read, the next one may begin."""
        if name in self._lost:
            return
        if self._read_name is None:
            self._lost[name] = reason
        else:
            del self._named[self._addresses.pop(name).incarnation], self.peers[name]
        self._on_lost(name, reason)
        self._changed.notify()
