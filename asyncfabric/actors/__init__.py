"""Actors: tasks with bounded mailboxes and typed handlers, asked the same here and in other processes.

    class Add(Message[int]):
        a: int
        b: int

    class Adder(Actor):
        @handles(Add)
        async def add(self, message: Add) -> int:
            return message.a + message.b

A task has one mailbox and handles one message at a time; a supervisor decides what happens to a task that failed.
Runs on trio, on the event loop's thread; moves no bytes of users. docs/explain/actors.md has the rules.
"""

from asyncfabric._groups import beside
from asyncfabric.actors.actor import Actor, handles
from asyncfabric.actors.directory_changes import labels_of, member_changes
from asyncfabric.actors.link import Identity, Link
from asyncfabric.actors.membership import Drains, Gone, Joined, Loaded, Member, MemberChange, Membership
from asyncfabric.actors.message import Message
from asyncfabric.actors.node import Node, open_node
from asyncfabric.actors.peer_keeper import PeerKeeper, open_peer_keeper
from asyncfabric.actors.policy import Policy, Strategy
from asyncfabric.actors.reference import Reference
from asyncfabric.actors.region_ledger import LedgerRow, RegionLedger, RegionOwner
from asyncfabric.actors.supervisor import Supervisor
from asyncfabric.actors.trace import trace_context
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
    "beside",
    "handles",
    "labels_of",
    "member_changes",
    "open_node",
    "open_peer_keeper",
    "trace_context",
]
