"""Who is in the cluster: nodes with role, address and labels, held by leases, each change with an epoch.

Pure tables, no clock and no sockets: the directory's own (`DirectoryTable`) and the copy of a node
(`DirectoryView`). Serving and asking are in `directory_server` and `directory_client`, what directories share in
`stores`. The data path never asks.
DI-1: epochs grow by one with each change, and a view that applied all of them equals the table; the tables of all
directories of one store are equal at one epoch.
DI-2: a view forgets a node only when a directory that had time to learn of it reports that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, structs

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


ChangeKind = Literal["joined", "changed", "draining", "left", "lost"]


class NodeChange(Struct, frozen=True):
    """One change: the epoch that it made, the node as it is now (or was last), and what happened.

    `kind` is joined, changed, draining, left (by its own message) or lost (without one).
    """

    epoch: Number
    kind: ChangeKind
    node: Node
    reason: Text = ""


class Decision(Struct, frozen=True):
    """What a directory decided at once: changes of consecutive epochs, or that the table is settled.

    Attributes:
        changes: made by it.
        directory: the one that decided; it holds the nodes that it puts in, and ends their leases.
        key: public key of the link of the node that it puts in; "" without keys.
        settled: each living node had the time of a lease to register.
    """

    changes: tuple[NodeChange, ...] = ()
    directory: Identity | None = None
    key: Annotated[str, Meta(max_length=64)] = ""
    settled: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether it decides nothing."""
        return not (self.changes or self.settled)


class Hold(Struct, frozen=True):
    """A node that is in, the directory that holds it, and the key of its link."""

    node: Node
    directory: Identity | None
    key: str


class TableImage(Struct, frozen=True):
    """The whole table at an epoch."""

    epoch: Number = 0
    settled: bool = False
    holds: tuple[Hold, ...] = ()


class DirectoryTable:
    """The table of one directory, or its copy of the one that directories share.

    Methods return decisions and change nothing; `apply` takes decisions in, of this directory and of others. Leases
    are those of the nodes that this directory holds, and of those whose directory is gone (`release`).
    """

    def __init__(
        self, lease_ns: int = LEASE_NS, *, directory: Identity | None = None, image: TableImage | None = None
    ) -> None:
        image = image or TableImage()
        self.lease_ns = lease_ns
        self.epoch: int = image.epoch
        self.settled: bool = image.settled
        self.nodes: dict[str, Node] = {hold.node.identity.name: hold.node for hold in image.holds}
        self._holds: dict[str, Hold] = {hold.node.identity.name: hold for hold in image.holds}
        self._directory = directory
        self._deadlines: dict[str, int] = {}
        self._changes: deque[NodeChange] = deque(maxlen=KEPT_CHANGES)

    # ---- decisions

    def register(
        self, identity: Identity, role: str, address: str, labels: Mapping[str, str], key: str = ""
    ) -> Decision:
        """Put a node in; a former incarnation of its name is lost. Nothing changes when there is an objection."""
        if self.objection(identity, role, key):
            return Decision()
        before = self._holds.get(identity.name)
        node = Node(identity, role, address, dict(labels))
        if before == Hold(node, self._directory, key):
            return Decision()
        if before is None or before.node.identity == identity:
            return self._decided(("changed" if before else "joined", node, ""), key=key)
        return self._decided(("lost", before.node, f"replaced by {identity}"), ("joined", node, ""), key=key)

    def objection(self, identity: Identity, role: str, key: str = "") -> str:
        """Return why a node may not be put in, "" when it may: its name lives later, in another role, or by a key."""
        hold = self._holds.get(identity.name)
        if hold is None:
            return ""
        living = hold.node
        if living.identity.incarnation > identity.incarnation:
            return f"a later incarnation of its name, {living.identity}, is in"
        if living.role != role:
            return f"its name is in use by a {living.role} node"
        return f"its name is in use by a {living.role} node with another key" if hold.key != key else ""

    def drain(self, identity: Identity) -> Decision:
        """Mark a node: it takes no new work."""
        node = self.find(identity)
        if node is None or node.state == "draining":
            return Decision()
        return self._decided(("draining", structs.replace(node, state="draining"), ""))

    def leave(self, identity: Identity) -> Decision:
        """Take a node out that asks for it."""
        node = self.find(identity)
        return self._decided(("left", node, "it left")) if node else Decision()

    def lose(self, identity: Identity, reason: str) -> Decision:
        """Take a node out whose session is lost, unless another directory holds it by now."""
        node = self.find(identity)
        return self._decided(("lost", node, reason)) if node and self._is_mine(identity) else Decision()

    def expire(self, now_ns: int) -> Decision:
        """Take all nodes out whose lease has ended."""
        late = [self.nodes[name] for name, deadline in self._deadlines.items() if now_ns >= deadline]
        reason = f"did not renew its lease of {self.lease_ns / SECOND_NS:g} s"
        return self._decided(*(("lost", node, reason) for node in late))

    def settle(self) -> Decision:
        """State that each living node had the time to register."""
        return Decision() if self.settled else Decision(directory=self._directory, settled=True)

    # ---- what is decided

    def apply(self, decision: Decision, now_ns: int) -> bool:
        """Take a decision in; False, and nothing changes, where it does not follow what was decided before."""
        epochs = range(self.epoch + 1, self.epoch + 1 + len(decision.changes))
        if [change.epoch for change in decision.changes] != list(epochs):
            return False
        for change in decision.changes:
            self._apply(change, decision, now_ns)
        self.settled |= decision.settled
        return True

    def renew(self, identity: Identity, now_ns: int) -> bool:
        """Renew a lease; False when the node is not in, or another directory holds it."""
        if not self._is_mine(identity):
            return False
        self._deadlines[identity.name] = now_ns + self.lease_ns
        return True

    def holders(self) -> set[Identity]:
        """Return the other directories that hold nodes."""
        return {hold.directory for hold in self._holds.values() if hold.directory} - {self._directory}

    def release(self, directory: Identity, deadline_ns: int) -> None:
        """A directory is gone: its nodes, unless they register again, are lost at a deadline."""
        for name, hold in self._holds.items():
            if hold.directory == directory:
                self._deadlines.setdefault(name, deadline_ns)

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

    def image(self) -> TableImage:
        """Return all of it but the leases."""
        return TableImage(self.epoch, self.settled, tuple(self._holds.values()))

    def _is_mine(self, identity: Identity) -> bool:
        hold = self._holds.get(identity.name)
        return hold is not None and hold.node.identity == identity and hold.directory == self._directory

    def _decided(self, *changes: tuple[ChangeKind, Node, str], key: str = "") -> Decision:
        made = (
            NodeChange(self.epoch + number, kind, node, reason[:500])
            for number, (kind, node, reason) in enumerate(changes, 1)
        )
        return Decision(tuple(made), self._directory, key)

    def _apply(self, change: NodeChange, decision: Decision, now_ns: int) -> None:
        self.epoch = change.epoch
        self._changes.append(change)
        name = change.node.identity.name
        before = self._holds.get(name)
        if change.kind in ("left", "lost"):
            for kept in (self.nodes, self._holds, self._deadlines):
                kept.pop(name, None)
            return
        self.nodes[name] = change.node
        if change.kind == "draining" and before is not None:
            self._holds[name] = structs.replace(before, node=change.node)
            return
        self._holds[name] = Hold(change.node, decision.directory, decision.key)
        self._deadlines.pop(name, None)
        if decision.directory == self._directory:
            self._deadlines[name] = now_ns + self.lease_ns


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
