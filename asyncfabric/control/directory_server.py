"""serve_directory: the directory of a cluster, on a link of the node that embeds it.

On the event loop's thread. The tables are in `directory`, what several directories share in `stores`. It writes nothing
to disk: one that was killed, and had no store but its memory, begins empty under a new incarnation, and the nodes
register again by themselves.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf

import anyio
from anyio.abc import TaskGroup

from asyncfabric._notice import Notice
from asyncfabric.control.address import LinkAddress
from asyncfabric.control.directory import LEASE_NS, Decision, DirectoryTable
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
    decode_request,
    encode,
)
from asyncfabric.control.events import Arrival
from asyncfabric.control.link import Link
from asyncfabric.control.messages import Identity
from asyncfabric.control.stores.log import SharedTable
from asyncfabric.control.stores.memory import DirectoryStore, MemoryStore
from asyncfabric.errors import ClosedError, PeerError

log: logging.Logger = logging.getLogger("asyncfabric.control")


@dataclass(frozen=True, slots=True)
class SecretGrant:
    """The secret that a directory gives to nodes for their fabrics, and to which.

    Attributes:
        secret: of the fabrics; never printed.
        roles: of the peers that get it; others have no fabric, so they have no use for it.
    """

    secret: bytes = field(repr=False)
    roles: Set[str]


@dataclass(frozen=True, slots=True)
class _SessionLost:
    reason: str


class Directory:
    """A directory that serves; made by `serve_directory`."""

    def __init__(
        self, link: Link, lease_ns: int, tasks: TaskGroup, store: DirectoryStore, grant: SecretGrant | None
    ) -> None:
        """Not for users: use `serve_directory`."""
        self._grant = grant
        self._lease_ns = lease_ns
        self._shared = SharedTable(
            store,
            link.identity,
            lease_ns,
            grant.secret if grant is not None else None,
            applied=self._report,
            begun=self._begin_anew,
        )
        self.unreadable: int = 0
        self._link = link
        self._tasks = tasks
        self._watchers: dict[Identity, _Watcher] = {}
        self._undecided: dict[tuple[Identity, type], Register | DrainMe | LeaveMe | _SessionLost] = {}
        self._more = Notice()
        self._alarm = Notice()
        self._settles_ns = _now_ns() + lease_ns

    @property
    def table(self) -> DirectoryTable:
        """The table, as this directory knows it."""
        return self._shared.table

    @property
    def log(self) -> str:
        """Which log epochs belong to: that of the store."""
        return self._shared.log

    @property
    def missing(self) -> str:
        """Why the store of this directory does not answer now, for people; "" while it does."""
        return self._shared.trouble

    async def _answer(self) -> None:
        async with self._link.listen(TO_DIRECTORY) as arrivals:
            async for arrival in arrivals:
                request = decode_request(arrival.body)
                if request is None:
                    self.unreadable += 1
                    log.warning("directory: a request of %s cannot be read", arrival.sender)
                    continue
                self._take(arrival, request)

    def _take(self, arrival: Arrival, request: Request) -> None:
        sender = arrival.sender
        watcher = self._watcher_of(sender)
        match request:
            case Register() | DrainMe() | LeaveMe():
                self._put(sender, request)
            case Renew():
                if not self.table.renew(sender, _now_ns()) and (sender, Register) not in self._undecided:
                    watcher.put(Unregistered("not in: the lease ended, or the directory is new", True))
            case WatchFrom(epoch, of_log):
                watcher.watch(epoch if of_log in ("", self.log) else 0, ahead=of_log == self.log)
            case AskSecret():
                watcher.put(self._secret_for(sender))

    def _put(self, sender: Identity, request: Register | DrainMe | LeaveMe | _SessionLost) -> None:
        """Have it decided, in the order of what came last of each kind: a store that is away makes no queue long."""
        self._undecided.pop((sender, type(request)), None)
        self._undecided[sender, type(request)] = request
        self._more.notify()

    async def _decide(self) -> None:
        while True:
            while self._undecided:
                place = next(iter(self._undecided))
                request = self._undecided[place]
                await self._decide_on(place[0], request)
                if self._undecided.get(place) is request:
                    del self._undecided[place]
            await self._more.wait()

    async def _decide_on(self, sender: Identity, request: Register | DrainMe | LeaveMe | _SessionLost) -> None:
        watcher = self._watchers.get(sender)
        match request:
            case Register(role, address, labels) if watcher is not None:
                key, stated = self._link.key_of(sender), self._link.role_of(sender)
                objection = f"its link states the role {stated}, not {role}" if stated not in ("", role) else ""
                if not objection:
                    await self._shared.decide(lambda table: table.register(sender, role, address, labels, key))
                    objection = self.table.objection(sender, role, key)
                self.table.renew(sender, _now_ns())
                watcher.put(Unregistered(objection, False) if objection else Registered(self._lease_ns))
            case DrainMe():
                if watcher is not None and self.table.find(sender) is None:
                    watcher.put(Unregistered("not in", True))
                await self._shared.decide(lambda table: table.drain(sender))
            case LeaveMe():
                await self._shared.decide(lambda table: table.leave(sender))
            case _SessionLost(reason):
                await self._shared.decide(lambda table: table.lose(sender, reason))

    def _secret_for(self, peer: Identity) -> ClusterSecret:
        if self._grant is None:
            return ClusterSecret(b"", "the directory has no keys, so its cluster has no secret")
        role = self._link.role_of(peer)
        if role not in self._grant.roles:
            return ClusterSecret(b"", f"the role {role or 'of no node'} has no fabric")
        return ClusterSecret(self._grant.secret)

    def _watcher_of(self, peer: Identity) -> _Watcher:
        if peer not in self._watchers:
            watcher = self._watchers[peer] = _Watcher(self, peer)
            self._tasks.start_soon(watcher.run)
        return self._watchers[peer]

    def _report(self, decision: Decision) -> None:
        """Let watchers and leases follow a decision; one whom another directory took out may register again here."""
        self._alarm.notify()
        for watcher in self._watchers.values():
            watcher.wake()
            if decision.settled:
                watcher.put(Settled())
        if decision.directory != self._link.identity:
            for change in decision.changes:
                node = self._watchers.get(change.node.identity)
                if change.kind == "lost" and node is not None:
                    node.put(Unregistered(change.reason, True))

    def _begin_anew(self) -> None:
        self._settles_ns = _now_ns() + self._lease_ns
        self._alarm.notify()
        for watcher in self._watchers.values():
            if watcher.watches:
                watcher.watch(0)

    async def _follow_sessions(self) -> None:
        """A node whose session is lost is lost: its lease would only show it later.

        It may be there again before this is noticed, and have sent everything once more, to a watcher that ends here.
        """
        async with self._link.watch() as changes:
            async for change in changes:
                if change.state != "lost":
                    continue
                was_in = self.table.find(change.peer) is not None or (change.peer, Register) in self._undecided
                self._put(change.peer, _SessionLost(change.reason))
                watcher = self._watchers.pop(change.peer, None)
                if watcher is None:
                    continue
                watcher.end()
                if any(peer.identity == change.peer for peer in self._link.peers()):
                    again = self._watcher_of(change.peer)
                    if watcher.watches:
                        again.watch(0)
                    if was_in:
                        again.put(Unregistered(f"its session was lost: {change.reason}", True))

    async def _end_leases(self) -> None:
        while True:
            if not self.table.settled and _now_ns() >= self._settles_ns:
                await self._shared.decide(lambda table: table.settle())
            await self._shared.decide(lambda table: table.expire(_now_ns()))
            due = min(self.table.next_deadline_ns() or inf, inf if self.table.settled else self._settles_ns)
            with anyio.move_on_after(max(0.0, (due - _now_ns()) / 1e9)):
                await self._alarm.wait()


class _Watcher:
    """One node that receives news, at its own speed; what it missed is made up by epochs, or by a snapshot."""

    def __init__(self, directory: Directory, peer: Identity) -> None:
        self._directory = directory
        self._peer = peer
        self._epoch: int | None = None
        self._snapshot_due = False
        self._news: dict[type, News] = {}  # the last of each kind: more would be news of yesterday
        self._woken = anyio.Event()
        self._scope = anyio.CancelScope()

    def put(self, news: News) -> None:
        self._news[type(news)] = news
        self.wake()

    def watch(self, epoch: int, *, ahead: bool = False) -> None:
        """Begin after an epoch; one `ahead` of ours comes from another directory of this log, and waits for us."""
        table = self._directory.table
        ahead = ahead and epoch > table.epoch
        self._epoch = min(epoch, table.epoch)
        self._snapshot_due = not ahead and (epoch == 0 or table.since(epoch) is None)
        if table.settled and not self._snapshot_due:
            self.put(Settled())
        self.wake()

    @property
    def watches(self) -> bool:
        return self._epoch is not None

    def wake(self) -> None:
        self._woken.set()

    def end(self) -> None:
        self._scope.cancel()

    async def run(self) -> None:
        with self._scope:
            while True:
                for news in self._due():
                    try:
                        await self._directory._link.send(self._peer, FROM_DIRECTORY, encode(news))
                    except (PeerError, ClosedError):
                        return  # its session ends, and with it this watcher
                    except ValueError as error:  # a directory larger than this peer takes
                        log.error("directory: %s does not get its %s: %s", self._peer, type(news).__name__, error)
                await self._woken.wait()
                self._woken = anyio.Event()

    def _due(self) -> list[News]:
        table = self._directory.table
        news, self._news = self._news, {}
        due: list[News] = []
        if self._epoch is not None:
            changes = None if self._snapshot_due else table.since(self._epoch)
            if changes is None:
                due.append(Snapshot(table.epoch, table.settled, tuple(table.nodes.values()), self._directory.log))
            elif changes:
                due.append(Changes(tuple(changes)))
            self._epoch, self._snapshot_due = table.epoch, False
        # After the changes: settling before the last registration is reported would lose that node for a moment.
        return due + list(news.values())


@asynccontextmanager
async def serve_directory(
    link: Link, *, lease_ns: int = LEASE_NS, grant: SecretGrant | None = None, store: DirectoryStore | None = None
) -> AsyncIterator[Directory]:
    """Serve the directory on this link until the block is left. Nodes find it by the link's address.

    Directories that are given the same store show one table; entering waits for it.

    Args:
        link: an open link; its channel "directory" is used.
        lease_ns: how long a registration holds without being renewed.
        grant: the secret of the cluster's fabrics, for peers of its roles that ask; None: there is none.
        store: see `open_store`; None: a table of its own, in memory.

    Raises:
        ValueError: the lease is not in 10 ms .. 1 h, or the link is plain TCP, where everybody reads a secret, or the
            other directories of the store have another secret.

    Cancellation: ends the serving; the nodes keep their views.
    """
    if not 10_000_000 <= lease_ns <= 3_600_000_000_000:
        raise ValueError(f"lease_ns must be in 10 ms .. 1 h, got {lease_ns}")
    address = LinkAddress.parse(link.address)
    if grant is not None and address.is_tcp and not address.key:
        raise ValueError(f"a directory at {address} gives no secret away: open its link with keys")
    try:
        async with anyio.create_task_group() as tasks:
            directory = Directory(link, lease_ns, tasks, store or MemoryStore(), grant)
            await directory._shared.open()
            for task in (directory._shared.follow, directory._shared.keep_alive, directory._decide):
                tasks.start_soon(task)
            tasks.start_soon(directory._answer)
            tasks.start_soon(directory._follow_sessions)
            tasks.start_soon(directory._end_leases)
            try:
                yield directory
            finally:
                tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        # The group is ours, not the caller's: one exception in it is the caller's own, or the bug that ended us.
        if len(group.exceptions) == 1:
            raise group.exceptions[0] from None
        raise


def _now_ns() -> int:
    return int(anyio.current_time() * 1e9)
