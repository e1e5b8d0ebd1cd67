"""DirectoryClient: a node's registration and its view of the cluster, which outlives the directory.

On the event loop's thread. Connects, registers, renews, watches, and does all of it again when the directory comes back
at its address, or at the next one where there are several; a directory that refuses this node for good ends that.
Questions are answered from the view at once; the data path never asks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from types import TracebackType

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from asyncfabric.control.directory import LEASE_NS, MAX_LABELS, DirectoryView, Node, NodeChange
from asyncfabric.control.directory_messages import (
    FROM_DIRECTORY,
    TO_DIRECTORY,
    AskSecret,
    Changes,
    ClusterSecret,
    DrainMe,
    LeaveMe,
    News,
    Register,
    Registered,
    Renew,
    Request,
    Settled,
    Snapshot,
    Unregistered,
    WatchFrom,
    decode_news,
    encode,
)
from asyncfabric.control.events import Arrival
from asyncfabric.control.link import Link
from asyncfabric.control.messages import Identity, checked_name, checked_text
from asyncfabric.control.protocol_errors import RefusedError
from asyncfabric.errors import ClosedError, PeerError

log: logging.Logger = logging.getLogger("asyncfabric.control")

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
MOST_REFUSALS = 10  # in a row: with the pauses between them longer than a dead node of our name stays in
CONFIRMED_S = 4.0  # within which one of several directories confirms, or the next one is asked
MAX_UNSEEN = 4096
MAX_TEXT = 512


class DirectoryClient:
    """A node's place in the directory: `async with DirectoryClient(link, address) as client`.

    Entering does not wait for the directory; it may start later. Leaving the block without `leave()` looks to the
    others like any end of this process, once its link is closed.
    """

    def __init__(self, link: Link, address: str) -> None:
        """Make a client of the directory at this address; `link.address` itself where the directory is embedded.

        Several addresses, joined by commas, are of directories that share a store: it registers with one, which one
        its name decides, and goes to the next when that is lost.
        """
        self._link = link
        self._addresses = deque(part.strip() for part in address.split(","))
        self._addresses.rotate(sha256(link.identity.name.encode()).digest()[0])
        self._log = ""
        self._view = DirectoryView()
        self._server: Identity | None = None
        self._wanted: Register | None = None
        self._draining = False
        self._lease_ns = LEASE_NS
        self._lease_changed = anyio.Event()
        self._registered = anyio.Event()
        self._is_in = False
        self._asks_secret = False
        self._secret: ClusterSecret | None = None
        self._answered = anyio.Event()
        self._was_in_session = False
        self._trouble = "it did not answer yet"
        self._refused = ""
        self._ended = anyio.Event()
        self._watched: set[MemoryObjectSendStream[NodeChange]] = set()
        self._tasks: TaskGroup

    async def __aenter__(self) -> DirectoryClient:
        """Start.

        Cancellation: does not wait.
        """
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._stay_connected)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Stop.

        Cancellation: nothing is left over.
        """
        self._tasks.cancel_scope.cancel()
        watched, self._watched = self._watched, set()  # news that is being taken right now finds nobody to notify
        for stream in watched:
            stream.close()
        try:
            return await self._tasks.__aexit__(kind, value, traceback)
        except BaseExceptionGroup as group:
            if len(group.exceptions) == 1:
                raise group.exceptions[0] from None
            raise

    async def register(self, role: str, address: str, labels: Mapping[str, str] | None = None) -> None:
        """Register this node, until `leave`: again by itself whenever the directory comes back. Again to change it.

        Returns when a directory has confirmed it.

        Args:
            role: what the node does.
            address: where others reach it, as `Link.address`.
            labels: text by name, at most 64.

        Raises:
            TypeError, ValueError: an argument is wrong.
            PeerError: the directory refused this node for good, see `wait_refused`.

        Cancellation: the wish stays; `leave()` takes it back.
        """
        given = dict(labels or {})
        if len(given) > MAX_LABELS:
            raise ValueError(f"labels must be at most {MAX_LABELS}, got {len(given)}")
        for name, text in given.items():
            checked_text("the name of a label", name)
            if len(text) > MAX_TEXT:
                raise ValueError(f"label {name!r} must have at most {MAX_TEXT} characters, got {len(text)}")
        self._wanted = Register(checked_name("role", role), address, given)
        self._draining = False
        self._registered = anyio.Event()
        if not self._refused:
            await self._send(self._wanted)
            await self._registered.wait()
        if self._refused:
            raise PeerError(f"the directory refused {self._link.identity}: {self._refused}")

    async def fabric_secret(self) -> bytes:
        """Return the secret that the fabrics of this cluster prove to each other, for `FabricConfig.secret`.

        Waits for the directory; a directory that comes back is asked again, and a change of the secret is logged.

        Raises:
            PeerError: the directory has none, gives none to this role, or refused this node for good.

        Cancellation: only this wait ends.
        """
        if not self._asks_secret:
            self._asks_secret = True
            await self._send(AskSecret())
        if not self._refused:
            await self._answered.wait()
        if self._refused:
            raise PeerError(f"the directory refused {self._link.identity}: {self._refused}")
        assert self._secret is not None
        if not self._secret.secret:
            raise PeerError(f"no secret for the fabric of {self._link.identity}: {self._secret.reason}")
        return self._secret.secret

    async def drain(self) -> None:
        """Notify all that this node takes no new work; sent again to a directory that comes back.

        Cancellation: the wish stays.
        """
        self._draining = True
        await self._send(DrainMe())

    async def leave(self) -> None:
        """Take this node out, if the directory is there; else its lease and its session show it.

        Cancellation: the registration is not renewed any more.
        """
        self._wanted, self._is_in = None, False
        await self._send(LeaveMe())

    def nodes(self, role: str = "", *, state: str = "") -> list[Node]:
        """Return the nodes as last received, by name; of one role and in one state where these are given."""
        nodes = (self._view.nodes[name] for name in sorted(self._view.nodes))
        return [node for node in nodes if role in ("", node.role) and state in ("", node.state)]

    @property
    def is_connected(self) -> bool:
        """Whether the directory is there now; `nodes()` is of the last time it was."""
        return self._server is not None

    @property
    def missing(self) -> str:
        """Why this node is not in the directory now, for people; "" while it is."""
        if self._is_in:
            return ""
        if self._refused:
            return f"the directory refuses this node: {self._refused}"
        if self._server is None:
            return f"no session with the directory at {self._addresses[0]}: {self._trouble}"
        return "the directory has not confirmed the registration yet"

    async def wait_refused(self) -> str:
        """Wait until the directory refused this node for good, and return why.

        That is: another process lives under its name in another role, under another key or as a later start, or the
        directory does not trust its key, and MOST_REFUSALS attempts met with that; or a later start replaced it, or
        either side's trust list binds the other's key to another role, which holds at once: lists are read at a start.

        Cancellation: only this wait ends.
        """
        await self._ended.wait()
        return self._refused

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[MemoryObjectReceiveStream[NodeChange]]:
        """Watch changes; begins with a "joined" for each node that is in.

        A watcher that is 4,096 changes behind is ended, and watches anew.

        Cancellation: ends the watch.
        """
        send, receive = anyio.create_memory_object_stream[NodeChange](2 * MAX_UNSEEN)
        for node in self.nodes():
            send.send_nowait(NodeChange(self._view.epoch, "joined", node))
        self._watched.add(send)
        try:
            with receive:
                yield receive
        finally:
            self._watched.discard(send)
            send.close()

    # ---- staying connected

    async def _stay_connected(self) -> None:
        pause_s, failures, refusals, tried = FIRST_PAUSE_S, 0, 0, 0
        while not self._refused:
            address = self._addresses[0]
            try:
                self._server = await self._link.connect(address)
                pause_s, failures, refusals, tried = FIRST_PAUSE_S, 0, 0, 0
                self._was_in_session = True
                await self._speak_with(self._server)
                self._trouble = "the session was lost"
            except PeerError as error:
                self._trouble = str(error)
                if isinstance(error, RefusedError):
                    refusals += 1
                    replaced = error.code == "retired" and self._was_in_session
                    if replaced or error.code == "key_role" or refusals >= MOST_REFUSALS * len(self._addresses):
                        self._refuse(str(error))
                failures += 1
                if failures & (failures - 1) == 0:  # the 1st, 2nd, 4th, 8th: whoever waits for hours fills no disk
                    text = "directory at %s: %s; attempt %d, the next in %g s"
                    log.info(text, address, error, failures, pause_s)
            except ClosedError:
                return
            self._server, self._is_in = None, False
            self._addresses.rotate(-1)
            tried += 1
            if tried >= len(self._addresses):
                await anyio.sleep(pause_s)
                pause_s, tried = min(2 * pause_s, LONGEST_PAUSE_S), 0

    async def _speak_with(self, server: Identity) -> None:
        """Register, watch and renew, until the session with the directory is lost."""
        async with (
            self._link.watch() as changes,
            self._link.listen(FROM_DIRECTORY) as arrivals,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(self._read, server, arrivals, tasks.cancel_scope)
            tasks.start_soon(self._renew, server, tasks.cancel_scope)
            if len(self._addresses) > 1:
                tasks.start_soon(self._expect, tasks.cancel_scope)
            if server != self._link.identity:  # an embedded directory lives as long as we do
                async for change in changes:
                    if change.peer == server and change.state != "ready":
                        break
                tasks.cancel_scope.cancel()

    async def _read(
        self, server: Identity, arrivals: MemoryObjectReceiveStream[Arrival], speaking: anyio.CancelScope
    ) -> None:
        try:
            async for arrival in arrivals:
                news = decode_news(arrival.body)
                if arrival.sender == server and news is not None:
                    await self._take(server, news)
        except (PeerError, ClosedError):
            speaking.cancel()  # the session was lost behind news that wanted an answer

    async def _renew(self, server: Identity, speaking: anyio.CancelScope) -> None:
        try:
            await self._send_all(server)
            while True:
                with anyio.move_on_after(self._lease_ns / 3e9):
                    await self._lease_changed.wait()
                    self._lease_changed = anyio.Event()
                    continue
                if self._wanted is not None:
                    await self._link.send(server, TO_DIRECTORY, encode(Renew()))
        except (PeerError, ClosedError):
            speaking.cancel()  # the session was lost, maybe before we began to watch

    async def _expect(self, speaking: anyio.CancelScope) -> None:
        """Go to the next directory when this one does not confirm: it may be the one that its store is away from."""
        waited = 0
        while waited < 2:
            await anyio.sleep(CONFIRMED_S / 2)
            waited = waited + 1 if self._wanted is not None and not self._is_in else 0
        self._trouble = f"the directory did not confirm within {CONFIRMED_S:g} s"
        speaking.cancel()

    async def _send_all(self, server: Identity) -> None:
        if self._asks_secret:
            await self._link.send(server, TO_DIRECTORY, encode(AskSecret()))
        if self._wanted is not None:
            await self._link.send(server, TO_DIRECTORY, encode(self._wanted))
            if self._draining:
                await self._link.send(server, TO_DIRECTORY, encode(DrainMe()))
        watch = WatchFrom(self._view.epoch, self._log) if self._log else WatchFrom(0)
        await self._link.send(server, TO_DIRECTORY, encode(watch))

    async def _take(self, server: Identity, news: News) -> None:
        match news:
            case Registered(lease_ns):
                if lease_ns != self._lease_ns:
                    self._lease_ns = lease_ns
                    self._lease_changed.set()
                self._is_in = self._wanted is not None
                self._registered.set()
            case Unregistered(reason, again):
                self._is_in = False
                log.warning("directory %s: %s is not in: %s", server, self._link.identity, reason)
                if not again:
                    self._refuse(reason)
                elif self._wanted is not None:
                    await self._send_all(server)
            case Snapshot(epoch, settled, nodes, log_of) if log_of != self._log or epoch >= self._view.epoch:
                self._log = log_of
                self._publish(self._view.replace(epoch, nodes, settled=settled))
            case Changes(changes):
                applied = self._view.apply(changes)
                if applied is None:
                    await self._send(WatchFrom(0))
                else:
                    self._publish(applied)
            case Settled():
                self._publish(self._view.settle())
            case ClusterSecret():
                if self._secret not in (None, news):
                    log.error("directory %s has another secret for fabrics: start the nodes again", server)
                self._secret = news
                self._answered.set()

    def _refuse(self, reason: str) -> None:
        """The directory will not take this node: let those know that wait for it."""
        self._refused, self._wanted = reason, None
        self._registered.set()
        self._answered.set()
        self._ended.set()

    def _publish(self, news: Iterable[NodeChange]) -> None:
        for change in news:
            for stream in list(self._watched):
                if stream.statistics().current_buffer_used >= MAX_UNSEEN:
                    self._watched.discard(stream)
                    stream.close()
                    continue
                try:
                    stream.send_nowait(change)
                except anyio.BrokenResourceError:
                    self._watched.discard(stream)  # it left

    async def _send(self, request: Request) -> None:
        """Send to the directory, if it is there; what the next one has to have is sent when it comes."""
        if self._server is not None:
            try:
                await self._link.send(self._server, TO_DIRECTORY, encode(request))
            except (PeerError, ClosedError):
                return
