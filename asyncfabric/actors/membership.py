"""Membership: this node's view of the cluster: who is there in which role, who drains, who was lost.

Runs on the event loop's thread. Knows no sockets: changes come from any async iterator, such as the directory's watch.
The view is a level, not a stream of edges: who watches sees the latest state and may miss what lies between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import msgspec
import trio

from asyncfabric._notice import Notice
from asyncfabric.actors.link import Identity

MemberState = Literal["ready", "draining"]


class Member(msgspec.Struct, frozen=True):
    """One node as the directory knows it.

    Attributes:
        identity: name and incarnation.
        role: what it serves, for example `decode`.
        address: where its link is reached.
        fabric_address: bytes of its FabricAddress, empty when it has none.
        load: what it last stated about its load, in units of its role; smaller is freer.
        state: `draining` nodes finish what they have and take nothing new.
    """

    identity: Identity
    role: str
    address: str = ""
    fabric_address: bytes = b""
    load: float = 0.0
    state: MemberState = "ready"


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """A node is there, or stated anew what it is; it replaces every earlier life of its name."""

    member: Member


class Drains(msgspec.Struct, frozen=True, tag="drains"):
    """A node takes nothing new."""

    identity: Identity


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """A node stated how loaded it is."""

    identity: Identity
    load: float


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """A node left or was lost; `reason` states which."""

    identity: Identity
    reason: str = "left"


MemberChange = Joined | Drains | Loaded | Gone


class Membership:
    """The view. Feed it with `follow` or `apply`."""

    def __init__(self) -> None:
        """Make an empty view."""
        self._members: dict[str, Member] = {}
        self._assigned: Counter[Identity] = Counter()
        self._shares: dict[str, tuple[Identity, Mapping[Identity, int]]] = {}
        self._elsewhere: Counter[Identity] = Counter()
        self._changed = trio.Event()
        self._reassigned = Notice()

    def apply(self, change: MemberChange) -> None:
        """Take one change; one of an earlier life of a name than the one in the view changes nothing."""
        if isinstance(change, Joined):
            self._members[change.member.identity.name] = change.member
            self._add_shares()
        else:
            member = self._members.get(change.identity.name)
            if member is None or member.identity != change.identity:
                return
            if isinstance(change, Gone):
                del self._members[change.identity.name]
                self._add_shares()
            elif isinstance(change, Drains):
                self._members[change.identity.name] = msgspec.structs.replace(member, state="draining")
            else:
                self._members[change.identity.name] = msgspec.structs.replace(member, load=change.load)
        self._changed.set()
        self._changed = trio.Event()

    async def follow(self, changes: AsyncIterable[MemberChange]) -> None:
        """Apply changes until they end.

        Cancellation: the view stays as it is.
        """
        async for change in changes:
            self.apply(change)

    def members(self, role: str | None = None, state: MemberState | None = "ready") -> tuple[Member, ...]:
        """Return the members of a role in a state, by name; None for all roles or all states."""
        found = (
            member for member in self._members.values() if role in (None, member.role) and state in (None, member.state)
        )
        return tuple(sorted(found, key=lambda member: member.identity.name))

    def member(self, identity: Identity) -> Member | None:
        """Return this life of a node, None when it is not there (any more)."""
        member = self._members.get(identity.name)
        return member if member is not None and member.identity == identity else None

    async def wait_for(self, role: str, count: int = 1) -> tuple[Member, ...]:
        """Return the ready members of a role, when there are at least `count`.

        Cancellation: only this wait ends.
        """
        await trio.lowlevel.checkpoint()
        while len(found := self.members(role)) < count:
            await self._changed.wait()
        return found

    def views(self) -> AsyncIterator[tuple[Member, ...]]:
        """Iterate over all members, now and after changes; changes that come while the caller is busy come together."""
        return _Views(self)

    def least_loaded(self, role: str) -> Member | None:
        """Return the ready member of a role with the least load, with what is assigned to it; None if none is ready.

        Of equals, the one that least is assigned to by this node and those that share, then the first by name.
        """
        return min(self.members(role), key=self._weight, default=None)

    def by_load(self, role: str) -> tuple[Member, ...]:
        """Return the ready members of a role, in the order in which `least_loaded` would choose them."""
        return tuple(sorted(self.members(role), key=self._weight))

    def load_of(self, member: Member) -> float:
        """Return the load that members are compared by: what it stated, and what this node and others assigned."""
        return member.load + self._assigned[member.identity] + self._elsewhere[member.identity]

    @contextmanager
    def assigned(self, identity: Identity) -> Iterator[None]:
        """Count one piece of work towards a member's load while the context is open: its own word comes later."""
        self._assigned[identity] += 1
        self._reassigned.notify()
        try:
            yield
        finally:
            self._assigned[identity] -= 1
            if not self._assigned[identity]:
                del self._assigned[identity]
            self._reassigned.notify()

    def assigned_to(self, identity: Identity) -> int:
        """Return how many pieces of work this node counts towards a member now."""
        return self._assigned[identity]

    def assignments(self) -> dict[Identity, int]:
        """Return the pieces of work that this node counts, by member: its share, for others that choose."""
        return dict(self._assigned)

    async def wait_reassigned(self) -> None:
        """Return at the next change of what this node counts.

        Cancellation: only this wait ends.
        """
        await self._reassigned.wait()

    def share(self, source: Identity, assigned: Mapping[Identity, int]) -> None:
        """Count what another node assigned too, in place of what it shared before, while that node is a member."""
        self._shares[source.name] = source, dict(assigned)
        self._add_shares()

    def _add_shares(self) -> None:
        if not self._shares:
            return
        self._elsewhere.clear()
        for source, assigned in self._shares.values():
            if self.member(source) is not None:
                self._elsewhere.update(assigned)

    def _weight(self, member: Member) -> tuple[float, int, str]:
        assigned = self._assigned[member.identity] + self._elsewhere[member.identity]
        return self.load_of(member), assigned, member.identity.name


class _Views(AsyncIterator[tuple[Member, ...]]):
    """Not an async generator: one that is left in the middle has to be closed, and nothing here needs closing."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._seen: trio.Event | None = None

    async def __anext__(self) -> tuple[Member, ...]:
        await trio.lowlevel.checkpoint()
        if self._seen is not None:
            await self._seen.wait()
        self._seen = self._membership._changed
        return self._membership.members(state=None)
