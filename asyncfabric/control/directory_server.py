"""serve_directory: the directory of a cluster, on a link of the node that embeds it.

On the event loop's thread. The tables are in `directory`. It writes nothing to disk: a directory that was killed begins
empty under a new incarnation, and the nodes register again by themselves.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf

import anyio
from anyio.abc import TaskGroup

from asyncfabric.control.address import LinkAddress
from asyncfabric.control.directory import LEASE_NS, DirectoryTable, NodeChange
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


class Directory:
    """A directory that serves; made by `serve_directory`."""

    def __init__(self, link: Link, lease_ns: int, tasks: TaskGroup, grant: SecretGrant | None = None) -> None:
        """Not for users: use `serve_directory`."""
        self._grant = grant
        self.table: DirectoryTable = DirectoryTable(lease_ns, now_ns=_now_ns())
        self.unreadable: int = 0
        self._link = link
        self._tasks = tasks
        self._watchers: dict[Identity, _Watcher] = {}
        self._alarm = anyio.Event()

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
        sender, now_ns = arrival.sender, _now_ns()
        watcher = self._watcher_of(sender)
        match request:
            case Register(role, address, labels):
                stated = self._link.role_of(sender)
                objection = f"its link states the role {stated}, not {role}" if stated not in ("", role) else ""
                objection = objection or self.table.objection(sender, role)
                if not objection:
                    self._publish(self.table.register(sender, role, address, labels, now_ns))
                watcher.put(Unregistered(objection, False) if objection else Registered(self.table.lease_ns))
            case Renew():
                if not self.table.renew(sender, now_ns):
                    watcher.put(Unregistered("not in: the lease ended, or the directory is new", True))
            case DrainMe():
                if self.table.find(sender) is None:
                    watcher.put(Unregistered("not in", True))
                self._publish(self.table.drain(sender))
            case LeaveMe():
                self._publish(self.table.leave(sender))
            case WatchFrom(epoch):
                watcher.watch(epoch)
            case AskSecret():
                watcher.put(self._secret_for(sender))

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

    def _publish(self, changes: Iterable[NodeChange]) -> None:
        if changes:
            self._alarm.set()
            for watcher in self._watchers.values():
                watcher.wake()

    async def _follow_sessions(self) -> None:
        """A node whose session is lost is lost: its lease would only show it later.

        It may be there again before this is noticed, and have sent everything once more, to a watcher that ends here.
        """
        async with self._link.watch() as changes:
            async for change in changes:
                if change.state != "lost":
                    continue
                was_in = self.table.find(change.peer) is not None
                self._publish(self.table.lose(change.peer, change.reason))
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
        reported = False
        while True:
            settled = self.table.is_settled(_now_ns())
            if settled and not reported:
                reported = True
                for watcher in self._watchers.values():
                    watcher.put(Settled())
            due = min(self.table.next_deadline_ns() or inf, inf if settled else self.table.settles_ns)
            with anyio.move_on_after(max(0.0, (due - _now_ns()) / 1e9)):
                await self._alarm.wait()
                self._alarm = anyio.Event()
            self._publish(self.table.expire(_now_ns()))


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

    def watch(self, epoch: int) -> None:
        self._epoch = epoch
        self._snapshot_due = epoch == 0 or self._directory.table.since(epoch) is None
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
                due.append(Snapshot(table.epoch, table.is_settled(_now_ns()), tuple(table.nodes.values())))
            elif changes:
                due.append(Changes(tuple(changes)))
            self._epoch, self._snapshot_due = table.epoch, False
        # After the changes: settling before the last registration is reported would lose that node for a moment.
        return due + list(news.values())


@asynccontextmanager
async def serve_directory(
    link: Link, *, lease_ns: int = LEASE_NS, grant: SecretGrant | None = None
) -> AsyncIterator[Directory]:
    """Serve the directory on this link until the block is left. Nodes find it by the link's address.

    Args:
        link: an open link; its channel "directory" is used.
        lease_ns: how long a registration holds without being renewed.
        grant: the secret of the cluster's fabrics, for peers of its roles that ask; None: there is none.

    Raises:
        ValueError: the lease is not in 10 ms .. 1 h, or the link is plain TCP, where everybody reads a secret.

    Cancellation: ends the serving; the nodes keep their views.
    """
    if not 10_000_000 <= lease_ns <= 3_600_000_000_000:
        raise ValueError(f"lease_ns must be in 10 ms .. 1 h, got {lease_ns}")
    address = LinkAddress.parse(link.address)
    if grant is not None and address.is_tcp and not address.key:
        raise ValueError(f"a directory at {address} gives no secret away: open its link with keys")
    try:
        async with anyio.create_task_group() as tasks:
            directory = Directory(link, lease_ns, tasks, grant)
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
