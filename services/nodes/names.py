"""Names of nodes for the numbers of their fabrics: what the directory stated, kept also for those that are lost.

On the event loop. Who waits for a dead node wants its name, and by then the directory has forgotten it.
"""

from __future__ import annotations

import re
from collections import OrderedDict

from asyncfabric import FabricAddress
from asyncfabric.actors import Joined, Member, MemberChange

REMEMBERED = 4096
_FABRIC = re.compile(r"<Peer [^:>]*: ([0-9a-f]{16})>|fabric ([0-9a-f]{16})")


class NodeNames:
    """Names by incarnation of the fabric."""

    def __init__(self) -> None:
        self._names: OrderedDict[int, str] = OrderedDict()

    def take(self, change: MemberChange) -> None:
        """Learn from a change that the directory reported."""
        if isinstance(change, Joined):
            self.learn(change.member)

    def learn(self, member: Member) -> None:
        """Take what a member states of its fabric; an address that makes no sense is passed over."""
        try:
            incarnation = FabricAddress.from_bytes(member.fabric_address).incarnation
        except ValueError:
            return
        self._names[incarnation] = member.identity.name
        self._names.move_to_end(incarnation)
        if len(self._names) > REMEMBERED:
            self._names.popitem(last=False)

    def of(self, incarnation: int) -> str:
        """Return the name of the node with this fabric, empty when nobody stated it."""
        return self._names.get(incarnation, "")

    def spoken(self, text: str) -> str:
        """Return a text with the names of nodes where it has the numbers of fabrics."""

        def name(found: re.Match[str]) -> str:
            return self.of(int(found[1] or found[2], 16)) or found[0]

        return _FABRIC.sub(name, text)
