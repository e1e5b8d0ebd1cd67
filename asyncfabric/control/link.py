"""Link: a process's place in the control plane. What its tasks call: connect, send, listen, watch, disconnect.

On the event loop's thread. Here is what waits; what happens between events is in `switchboard`, and what they mean in
`session_table`. What the bodies mean is the business of the layers above.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream

from asyncfabric.control.address import LinkAddress
from asyncfabric.control.events import Arrival, Leave, PathLost, SendParcel, SessionChange
from asyncfabric.control.link_values import LinkConfig, LinkPeer, LinkStatistics
from asyncfabric.control.listeners import Outlet
from asyncfabric.control.messages import ENVELOPE_BYTES, Identity, checked_text
from asyncfabric.control.protocol_errors import REFUSALS, REMEDIES, RefusedError
from asyncfabric.control.switchboard import Switchboard
from asyncfabric.control.window import MAX_CHANNELS, SendWindow, cost_of, largest_body
from asyncfabric.errors import ClosedError, PeerError

MAX_TRACE = 512


class Link:
    """One place in the control plane; made by `open_link`.

    Attributes:
        identity: who we are: name and incarnation.
        role: what we are in the cluster; empty for no node of it.
        address: what others connect to, as text.
    """

    def __init__(self, switchboard: Switchboard, config: LinkConfig, tasks: TaskGroup) -> None:
        """Not for users: use `open_link`."""
        self.identity: Identity = switchboard.identity
        self.role: str = switchboard.table.role
        self.address: str = switchboard.address
        self._board = switchboard
        self._table = switchboard.table
        self._config = config
        self._tasks = tasks
        self._closed = False
        self._queues: dict[tuple[Identity, str], anyio.Lock] = {}
        self._loop_window = SendWindow(config.window_bytes)

    async def connect(self, address: str) -> Identity:
        """Connect to the link at this address and return who is there, once its session is ready.

        Connecting to who is connected returns at once. Our own address gives our own identity: sends to it arrive here.

        Raises:
            TypeError, ValueError: address is none, or is plain TCP where CURVE is used, or the reverse.
            PeerError: nobody answered within `connect_deadline_s`.
            RefusedError: the peer takes no session with us (a PeerError); its code and text have the reason.
            ClosedError: the link is closed.

        Cancellation: the attempt ends, unless another task waits for it too.
        """
        await anyio.lowlevel.checkpoint()
        target = LinkAddress.parse(address)
        self._check_open()
        if address == self.address:
            return self.identity
        for peer in self._table.names.peers.values():
            if peer.state == "ready" and any(session.address == address for session in peer.sessions):
                return peer.identity
        dialing = self._board.dial(address, target)
        dialing.waiters += 1
        try:
            await dialing.ended.wait()
        finally:
            dialing.waiters -= 1
            if dialing.waiters == 0 and not dialing.ended.is_set():
                self._board.feed(PathLost(dialing.path, "the caller gave up"))
        if dialing.code in REFUSALS:
            raise RefusedError(
                f"no session with {address}: {dialing.reason}", code=dialing.code, remedy=REMEDIES.get(dialing.code, "")
            )
        if dialing.peer is None:
            raise PeerError(
                f"no session with {address}: {dialing.reason}",
                remedy="is the process there alive, is the address its present one, do both trust each other's key?",
            )
        return dialing.peer

    async def send(self, to: Identity, channel: str, body: bytes, trace: str | None = None) -> None:
        """Send a body to the listener of a channel; return when it is on its way. Senders of a channel queue fairly.

        Waits while the peer's listener has as much under way as its window takes (SV-3: nothing is dropped). Parcels
        of one sender arrive in order, each once, or the session is lost and watchers are notified.

        Args:
            to: an identity with a ready session, or our own.
            channel: 1..128 characters; a peer takes 64 different ones.
            body: bytes, opaque here.
            trace: W3C trace context.

        Raises:
            TypeError, ValueError: an argument is of the wrong type, or larger than the peer takes.
            PeerError: there is no session with this identity, or it is lost or draining.
            ClosedError: the link is closed.

        Cancellation: nothing was sent.
        """
        self._check_parcel(to, channel, body, trace)
        await anyio.lowlevel.checkpoint()
        queue = self._queues.get((to, channel))
        if queue is None:
            if self._send_nowait(to, channel, body, trace):
                return
            queue = self._queues[to, channel] = anyio.Lock()
        try:
            async with queue:
                while not self._send_nowait(to, channel, body, trace):
                    await self._board.room(to)
        finally:
            if not queue.statistics().tasks_waiting and self._queues.get((to, channel)) is queue:
                del self._queues[to, channel]

    def listen(self, channel: str) -> AbstractAsyncContextManager[MemoryObjectReceiveStream[Arrival]]:
        """Take the arrivals of a channel: `async with link.listen("x") as arrivals: async for arrival in arrivals`.

        One task listens on a channel. Arrivals that came before wait for it. A listener that does not take them stops
        its senders on this channel, by credit, and nobody else.

        Raises:
            BusyError: somebody listens on this channel.
            ClosedError: the link is closed.
        """
        self._check_open()
        return self._listen(checked_text("channel", channel))

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[MemoryObjectReceiveStream[SessionChange]]:
        """Watch sessions; begins with the present state of each peer.

        A watcher that is behind gets the last change of each peer, and before it "lost" if a session with it ended
        meanwhile; one that is 4,096 such changes behind is ended, and watches anew to see the present state.

        Cancellation: ends the watch.
        """
        self._check_open()
        peers = self._table.names.peers.values()
        outlet = Outlet(SessionChange(peer.identity, peer.state, "present state") for peer in peers)
        send, receive = anyio.create_memory_object_stream[SessionChange](self._config.listener_frames)
        scope = anyio.CancelScope()
        self._board.outlets.append(outlet)
        self._tasks.start_soon(outlet.forward, send, scope)
        try:
            with receive:
                yield receive
        finally:
            scope.cancel()
            self._board.outlets.remove(outlet)

    async def disconnect(self, peer: Identity) -> None:
        """Leave a peer in two phases: what either side sent arrives, then the session ends as lost with reason "left".

        Returns when it is over; at once when there is no session. Bounded by `drain_deadline_s`.

        Cancellation: the drain goes on by itself.
        """
        await anyio.lowlevel.checkpoint()
        self._board.feed(Leave(peer))
        while peer in self._table.names.peers:
            await self._board.room(peer)

    def peers(self) -> list[LinkPeer]:
        """Return the peers that there is a session with, by name."""
        return sorted(self._board.peers(), key=lambda peer: peer.identity.name)

    def role_of(self, peer: Identity) -> str:
        """Return the role that a peer stated, or our own; empty where it stated none or there is no session."""
        if peer == self.identity:
            return self.role
        found = self._table.names.peers.get(peer)
        return found.role if found is not None else ""

    def key_of(self, peer: Identity) -> str:
        """Return the public key that a peer's session came with; empty without keys, and where there is no session."""
        found = self._table.names.peers.get(peer)
        return found.key if found is not None else ""

    def statistics(self) -> LinkStatistics:
        """Return what was counted so far."""
        return self._board.statistics()

    async def aclose(self) -> None:
        """Leave all peers, for at most `close_deadline_s`; then nothing can be sent.

        Cancellation: the rest of the peers finds out by its deadlines.
        """
        with anyio.move_on_after(self._config.close_deadline_s):
            async with anyio.create_task_group() as leaving:
                for peer in list(self._table.names.peers):
                    leaving.start_soon(self.disconnect, peer)
        for session in list(self._table.sessions.values()):
            self._board.feed(PathLost(session.path, "the link closes"))
        self._closed = True
        self._board.end()

    def _send_nowait(self, to: Identity, channel: str, body: bytes, trace: str | None) -> bool:
        """Send, or return False when there is no room now."""
        self._check_open()
        if to == self.identity:
            return self._send_to_self(channel, body, trace)
        peer = self._table.names.peers.get(to)
        if peer is None or peer.state != "ready":
            never = "there never was one: connect first"
            why = "it is draining" if peer else self._table.names.last_words.get(to, never)
            raise PeerError(f"no ready session with {to}: {why}", remedy="watch() reports when peers come and go")
        session = peer.way_out
        if len(body) > session.largest_body:
            raise ValueError(f"body has {len(body)} bytes, {to} takes {session.largest_body}")
        if not session.sends.knows(channel):
            raise ValueError(f"channel {channel!r} is one too many: a peer takes {MAX_CHANNELS} different ones")
        if not (self._table.admits(to, channel, len(body)) and self._board.wire.has_room(session.path)):
            return False
        self._board.feed(SendParcel(to, channel, body, trace))
        return True

    def _send_to_self(self, channel: str, body: bytes, trace: str | None) -> bool:
        window, cost = self._loop_window, cost_of(len(body))
        if len(body) > min(largest_body(window.limit), self._config.max_frame_bytes - ENVELOPE_BYTES):
            raise ValueError(f"body has {len(body)} bytes, at most {self._config.max_frame_bytes - ENVELOPE_BYTES}")
        if not window.admits(channel, cost):
            return False
        window.send(channel, cost)

        def taken() -> None:
            window.credit(channel, window.taken.get(channel, 0) + cost)
            self._board.make_room(self.identity)

        self._board.inbox(channel).put(Arrival(self.identity, body, trace), taken)
        return True

    @asynccontextmanager
    async def _listen(self, channel: str) -> AsyncIterator[MemoryObjectReceiveStream[Arrival]]:
        with self._board.inbox(channel).listen(self._config.listener_frames) as arrivals:
            yield arrivals

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"link {self.identity} is closed", remedy="its `async with` has ended")

    def _check_parcel(self, to: Identity, channel: str, body: bytes, trace: str | None) -> None:
        if not isinstance(to, Identity):
            raise TypeError(f"to must be an Identity, got {type(to).__name__}: names and addresses are not enough")
        if not isinstance(body, bytes):
            raise TypeError(f"body must be bytes, got {type(body).__name__}")
        checked_text("channel", channel)
        if trace is not None and not 0 < len(trace) <= MAX_TRACE:
            raise ValueError(f"trace must have 1..{MAX_TRACE} characters, got {len(trace)}")
