"""Between the session table and the world: feeds it events, does its actions, keeps its time.

On the event loop's thread. Knows no sockets: a `Wire` moves frames (`zmq_wire`). What tasks call is in `link`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import inf
from types import MappingProxyType
from typing import Protocol

import anyio

from asyncfabric.control.address import LinkAddress
from asyncfabric.control.events import (
    Change,
    Close,
    Deliver,
    Dial,
    Dialed,
    DialFailed,
    Emit,
    Event,
    Path,
    PathLost,
    Received,
    Room,
    Tick,
)
from asyncfabric.control.keys import NOBODY, Roles
from asyncfabric.control.link_values import LinkConfig, LinkPeer, LinkStatistics
from asyncfabric.control.listeners import Inbox, Outlet
from asyncfabric.control.messages import Identity
from asyncfabric.control.session_table import SessionTable


class Wire(Protocol):
    """What moves frames."""

    def dial(self, path: int, address: LinkAddress) -> None:
        """Open a path; raises PeerError when the address cannot be used at all."""

    def emit(self, path: Path, frame: bytes) -> None:
        """Send a frame, or keep it until there is room."""

    def has_room(self, path: Path) -> bool:
        """Return whether nothing waits for room on the path."""

    def close_path(self, path: Path) -> None:
        """Send what waits, if there is room, and close."""

    def drain(self) -> None:
        """Hand over what has come, and send what waits for room."""

    def hint(self, path: int) -> str:
        """Return what is known about a path that did not connect."""


class Dialing:
    """One connect under way; any number of tasks wait for it."""

    def __init__(self, path: int) -> None:
        self.path = path
        self.ended: anyio.Event = anyio.Event()
        self.waiters = 0
        self.peer: Identity | None = None
        self.reason = ""
        self.code = ""


class Switchboard:
    """The table of one link, and who waits for what it reports."""

    def __init__(
        self,
        identity: Identity,
        role: str,
        address: str,
        config: LinkConfig,
        wire: Wire,
        trusted: Mapping[str, Roles] = NOBODY,
    ) -> None:
        self.identity = identity
        self.address = address
        self.wire = wire
        self.table: SessionTable = SessionTable(
            identity, config.session_config(), address=address, role=role, trusted=trusted
        )
        self.outlets: list[Outlet] = []
        self._events: deque[Event] = deque()
        self._feeding = False
        self._alarm = anyio.Event()
        self._dials: dict[str, Dialing] = {}
        self._paths = 0
        self._inboxes: dict[str, Inbox] = {}
        self._rooms: dict[Identity, anyio.Event] = {}
        self._frames = [0, 0]  # sent, received
        self._bytes = [0, 0]
        self._lost = 0
        self._abandoned = 0

    def dial(self, address: str, target: LinkAddress) -> Dialing:
        """Begin to connect, or return the attempt that is under way."""
        dialing = self._dials.get(address)
        if dialing is None:
            self._paths += 1
            self.wire.dial(self._paths, target)
            dialing = self._dials[address] = Dialing(self._paths)
            self.feed(Dial(self._paths, address, target.key))
        return dialing

    def feed(self, event: Event) -> None:
        """Give the table an event and do what it orders; events that come meanwhile wait for their turn."""
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        sessions = len(self.table.sessions)
        try:
            while self._events:
                for action in self.table.feed(self._events.popleft(), _now_ns()):
                    self._do(action)
        finally:
            self._feeding = False
        if len(self.table.sessions) > sessions:
            self._alarm.set()

    def received(self, path: Path, frame: bytes, key: str) -> None:
        """A frame came in."""
        self._frames[1] += 1
        self._bytes[1] += len(frame)
        self.feed(Received(path, frame, key))

    def path_lost(self, path: Path, reason: str, code: str = "") -> None:
        """A path broke; `code` is one of REFUSALS where the peer did not take us."""
        self.feed(PathLost(path, reason, code))

    def writable(self, path: Path) -> None:
        """A path has room again."""
        session = self.table.sessions.get(path)
        if session is not None and session.identity is not None:
            self.make_room(session.identity)

    def refused(self, reason: str, detail: str) -> None:
        """The wire met something that is no frame of a session."""
        self.table.errors.count(reason, detail)

    async def keep_time(self) -> None:
        """Feed ticks when they are due. What has come is taken first: a loop that stood still must lose nobody."""
        while True:
            due = self.table.next_deadline_ns()
            with anyio.move_on_after(inf if due is None else max(0, due - _now_ns()) / 1e9):
                await self._alarm.wait()
                self._alarm = anyio.Event()
                continue
            self.wire.drain()
            self.feed(Tick())

    async def room(self, peer: Identity) -> None:
        """Wait until something changed for those who send to this peer.

        Cancellation: nothing happened.
        """
        await self._rooms.setdefault(peer, anyio.Event()).wait()

    def make_room(self, peer: Identity) -> None:
        """Let the tasks that wait for this peer look again."""
        room = self._rooms.pop(peer, None)
        if room is not None:
            room.set()

    def end(self) -> None:
        """Let everybody look again."""
        for identity in list(self._rooms):
            self.make_room(identity)

    def inbox(self, channel: str) -> Inbox:
        """Return the inbox of a channel."""
        inbox = self._inboxes.get(channel)
        if inbox is None:
            inbox = self._inboxes[channel] = Inbox(channel)
        return inbox

    def peers(self) -> list[LinkPeer]:
        """Return the living peers."""
        now_ns = _now_ns()
        return [
            LinkPeer(
                peer.identity,
                peer.role,
                peer.state,
                peer.way_out.address,
                len(peer.sessions),
                max(0, now_ns - max(session.received_ns for session in peer.sessions)) / 1e9,
            )
            for peer in self.table.names.peers.values()
        ]

    def statistics(self) -> LinkStatistics:
        """Return what was counted so far."""
        states = [peer.state for peer in self.table.names.peers.values()]
        return LinkStatistics(
            frames_sent=self._frames[0],
            frames_received=self._frames[1],
            bytes_sent=self._bytes[0],
            bytes_received=self._bytes[1],
            peers_ready=states.count("ready"),
            peers_draining=states.count("draining"),
            peers_lost=self._lost,
            waiting_arrivals=sum(map(len, self._inboxes.values())),
            abandoned_arrivals=self._abandoned,
            protocol_errors=MappingProxyType(dict(self.table.errors.counts)),
        )

    def _do(self, action: object) -> None:
        match action:
            case Emit(path, frame):
                self._frames[0] += 1
                self._bytes[0] += len(frame)
                self.wire.emit(path, frame)
            case Deliver(channel, arrival, taken):
                self.inbox(channel).put(arrival, lambda: self.feed(taken))
            case Room(peer):
                self.make_room(peer)
            case Change(change):
                for outlet in self.outlets:
                    outlet.put(change)
                if change.state == "lost":
                    self._forget(change.peer)
            case Dialed(path, peer):
                self._end_dial(path, peer, "", "")
            case DialFailed(path, reason, code):
                hint = self.wire.hint(path)
                self._end_dial(path, None, f"{reason} ({hint})" if hint else reason, code)
            case Close(path):
                self.wire.close_path(path)

    def _end_dial(self, path: int, peer: Identity | None, reason: str, code: str) -> None:
        for address, dialing in self._dials.items():
            if dialing.path == path:
                dialing.peer, dialing.reason, dialing.code = peer, reason, code
                dialing.ended.set()
                del self._dials[address]
                return

    def _forget(self, peer: Identity) -> None:
        """A peer is lost: what it sent to channels that nobody listens on would wait for ever."""
        self._lost += 1
        for inbox in list(self._inboxes.values()):
            if not inbox.listened:
                self._abandoned += inbox.forget(peer)
                if not inbox:
                    del self._inboxes[inbox.channel]


def _now_ns() -> int:
    return int(anyio.current_time() * 1e9)
