"""Actors: tasks with bounded mailboxes and typed handlers, asked the same here and in other processes.

    class Add(Message[int]):
        a: int
        b: int

    class Adder(Actor):
        @handles(Add)
        async def add(self, message: Add) -> int:
            return message.a + message.b

The public door of `asyncfabric._orchestration`; it re-exports and holds no logic. Runs on trio. docs/explain/actors.md
tells the rules.
"""

from asyncfabric._orchestration.actor import Actor, handles
from asyncfabric._orchestration.directory_changes import labels_of, member_changes
from asyncfabric._orchestration.link import Identity, Link
from asyncfabric._orchestration.membership import Drains, Gone, Joined, Loaded, Member, MemberChange, Membership
from asyncfabric._orchestration.message import Message
from asyncfabric._orchestration.node import Node, open_node
from asyncfabric._orchestration.peer_keeper import PeerKeeper, open_peer_keeper
from asyncfabric._orchestration.policy import Policy, Strategy
from asyncfabric._orchestration.reference import Reference
from asyncfabric._orchestration.region_ledger import LedgerRow, RegionLedger, RegionOwner
from asyncfabric._orchestration.supervisor import Supervisor
from asyncfabric._orchestration.trace import trace_context
from asyncfabric.errors import ActorDied, ActorError, RemoteError

__all__ = [
    "Actor",
    "ActorDied",
    "ActorError",
    "Drains",
    "Gone",
    "Identity",
    "Joined",
    "LedgerRow",
    "Link",
    "Loaded",
    "Member",
    "MemberChange",
    "Membership",
    "Message",
    "Node",
    "PeerKeeper",
    "Policy",
    "Reference",
    "RegionLedger",
    "RegionOwner",
    "RemoteError",
    "Strategy",
    "Supervisor",
    "handles",
    "labels_of",
    "member_changes",
    "open_node",
    "open_peer_keeper",
    "trace_context",
]
