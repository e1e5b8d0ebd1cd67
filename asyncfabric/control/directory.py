"""Who is in the cluster: nodes with role, address and labels, held by leases, each change with an epoch.

Pure tables, no clock and no sockets: the directory's own (`DirectoryTable`) and the copy of a node
(`DirectoryView`). Serving and asking are in `directory_server` and `directory_client`. The data path never asks.
DI-1: epochs grow by one with each change, and a view that applied all of them equals the table.
DI-2: a view forgets a node only when a directory that had time to learn of it reports that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from asyncfabric.control.messages import Identity, Name, NodeName, Number, Text

MAX_LABELS: Final = 64
KEPT_CHANGES: Final = 1024
SECOND_NS: Final = 1_000_000_000
LEASE_NS: Final = 10 * SECOND_NS


class Node(Struct, frozen=True):
    """One node of the cluster.

    Attributes:
        identity: name and incarnation.
        role: what it does, for example "prefill"; in the letters of a name.
        address: of its link.
        labels: anything else that others choose by, at most 64.
        state: "ready", or "draining": it takes no new work.
    """

    identity: Identity
    role: NodeName
    address: Text
    labels: Annotated[dict[Name, Text], Meta(max_length=MAX_LABELS)] = {}
    state: Literal["ready", "draining"] = "ready"


class NodeChange(Struct, frozen=True):
    """One change: the epoch that it made, the node as it is now (or was last), and what happened.

    `kind` is joined, changed, draining, left (by its own message) or lost (without one).
    """

    epoch: Number
    kind: Literal["joined", "changed", "draining", "left", "lost"]
    node: Node
    reason: Text = ""


class DirectoryTable:
    """The directory's own table."""

    def __init__(self, lease_ns: int = LEASE_NS, *, now_ns: int = 0) -> None:
        self.lease_ns = lease_ns
        self.epoch: int = 0
        self.settles_ns: int = now_ns + lease_ns
        self.nodes: dict[str, Node] = {}
        self._deadlines: dict[str, int] = {}
        self._changes: deque[NodeChange] = deque(maxlen=KEPT_CHANGES)

    def register(
        self, identity: Identity, role: str, address: str, labels: Mapping[str, str], now_ns: int
    ) -> list[NodeChange]:
        """Put a node in; a former incarnation of its name is lost. Nothing changes when there is an objection."""
        if self.objection(identity, role):
            return []
        before = self.nodes.get(identity.name)
        node = Node(identity, role, address, dict(labels))
        changes = []
        if before is not None and before.identity != identity:
            changes.append(self._remove(before, "lost", f"replaced by {identity}"))
            before = None
        self._deadlines[identity.name] = now_ns + self.lease_ns
        if node != before:
            changes.append(self._put(node, "changed" if before else "joined"))
        return changes

    def objection(self, identity: Identity, role: str) -> str:
        """Return why a node may not be put in, "" when it may: its name lives later, or in another role."""
        living = self.nodes.get(identity.name)
        if living is None:
            return ""
        if living.identity.incarnation > identity.incarnation:
            return f"a later incarnation of its name, {living.identity}, is in"
        return f"its name is in use by a {living.role} node" if living.role != role else ""

    def renew(self, identity: Identity, now_ns: int) -> bool:
        """Renew a lease; False when the node is not in."""
        if self.find(identity) is None:
            return False
        self._deadlines[identity.name] = now_ns + self.lease_ns
        return True

    def drain(self, identity: Identity) -> list[NodeChange]:
        """Mark a node: it takes no new work."""
        node = self.find(identity)
        if node is None or node.state == "draining":
            return []
        return [self._put(Node(node.identity, node.role, node.address, node.labels, "draining"), "draining")]

    def leave(self, identity: Identity) -> list[NodeChange]:
        """Take a node out that asks for it."""
        node = self.find(identity)
        return [self._remove(node, "left", "it left")] if node else []

    def lose(self, identity: Identity, reason: str) -> list[NodeChange]:
        """Take a node out whose session is lost."""
        node = self.find(identity)
        return [self._remove(node, "lost", reason)] if node else []

    def expire(self, now_ns: int) -> list[NodeChange]:
        """Take all nodes out whose lease has ended."""
        late = [name for name, deadline in self._deadlines.items() if now_ns >= deadline]
        reason = f"did not renew its lease of {self.lease_ns / SECOND_NS:g} s"
        return [self._remove(self.nodes[name], "lost", reason) for name in late]

    def next_deadline_ns(self) -> int | None:
        """Return when the next lease ends."""
        return min(self._deadlines.values(), default=None)

    def find(self, identity: Identity) -> Node | None:
        """Return the node of an identity, None when it is not in, or when its name has another incarnation."""
        node = self.nodes.get(identity.name)
        return node if node is not None and node.identity == identity else None

    def since(self, epoch: int) -> list[NodeChange] | None:
        """Return the changes after an epoch, None when a snapshot is needed."""
        if epoch == self.epoch:
            return []
        oldest = self._changes[0].epoch if self._changes else self.epoch + 1
        if not oldest - 1 <= epoch < self.epoch:
            return None
        return [change for change in self._changes if change.epoch > epoch]

    def is_settled(self, now_ns: int) -> bool:
        """Return whether each living node had the time of a lease to register."""
        return now_ns >= self.settles_ns

    def _put(
        self, node: Node, kind: Literal["joined", "changed", "draining"], *, now_ns: int | None = None
    ) -> NodeChange:
        self.nodes[node.identity.name] = node
        if now_ns is not None:
            self._deadlines[node.identity.name] = now_ns + self.lease_ns
        return self._note(NodeChange(self.epoch + 1, kind, node))

    def _remove(self, node: Node, kind: Literal["left", "lost"], reason: str) -> NodeChange:
        del self.nodes[node.identity.name]
        self._deadlines.pop(node.identity.name, None)
        return self._note(NodeChange(self.epoch + 1, kind, node, reason[:500]))

    def _note(self, change: NodeChange) -> NodeChange:
        self.epoch = change.epoch
        self._changes.append(change)
        return change


class DirectoryView:
    """A node's copy of the table; kept while there is no directory."""

    def __init__(self) -> None:
        self.epoch: int = 0
        self.nodes: dict[str, Node] = {}
        self._unconfirmed: set[str] = set()

    def apply(self, changes: Iterable[NodeChange]) -> list[NodeChange] | None:
        """Apply changes; return those that were news, None when some are missing and a snapshot is needed."""
        news = []
        for change in changes:
            if change.epoch <= self.epoch:
                continue
            if change.epoch != self.epoch + 1:
                return None
            self.epoch = change.epoch
            news += self._apply(change)
        return news

    def replace(self, epoch: int, nodes: Iterable[Node], *, settled: bool) -> list[NodeChange]:
        """Take a snapshot; return what differs. Nodes that a directory in its first lease lacks are kept for now."""
        before, self.nodes = self.nodes, {node.identity.name: node for node in nodes}
        self.epoch = epoch
        news = []
        for name, node in self.nodes.items():
            old = before.get(name)
            if old is None or old.identity != node.identity:
                news += [NodeChange(epoch, "lost", old, f"replaced by {node.identity}")] if old else []
                news.append(NodeChange(epoch, "joined", node))
            elif old != node:
                news.append(NodeChange(epoch, "draining" if node.state == "draining" else "changed", node))
        missing = {name: node for name, node in before.items() if name not in self.nodes}
        self.nodes |= missing
        self._unconfirmed = set(missing)
        return news + (self.settle() if settled else [])

    def settle(self) -> list[NodeChange]:
        """The directory has had its first lease: who is still unconfirmed is lost."""
        gone = [self.nodes.pop(name) for name in sorted(self._unconfirmed)]
        self._unconfirmed.clear()
        return [NodeChange(self.epoch, "lost", node, "it did not register with the new directory") for node in gone]

    def _apply(self, change: NodeChange) -> list[NodeChange]:
        node = change.node
        name = node.identity.name
        before = self.nodes.get(name)
        self._unconfirmed.discard(name)
        if change.kind in ("left", "lost"):
            if before is None or before.identity != node.identity:
                return []
            del self.nodes[name]
            return [change]
        self.nodes[name] = node
        if before is None or before == node:
            return [] if before == node else [change]
        if before.identity != node.identity:
            return [NodeChange(change.epoch, "lost", before, f"replaced by {node.identity}"), change]
        kind = "changed" if change.kind == "joined" else change.kind
        return [NodeChange(change.epoch, kind, node, change.reason)]
