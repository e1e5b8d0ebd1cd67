"""Reference: the name of an actor that can be asked from anywhere; hashable, and sent in messages like any value.

Pure but for the two calls, which go through the node of the running task. A reference names one life of one actor on
one life of one node; `named()` makes one that follows restarts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from asyncfabric.actors.context import current_node
from asyncfabric.actors.link import Identity
from asyncfabric.actors.message import Message

if TYPE_CHECKING:
    from asyncfabric.actors.node import Node

A = TypeVar("A")
ANY_LIFE = 0


class Reference(msgspec.Struct, frozen=True, dict=True):
    """Names an actor; made by `spawn`, `lookup`, or by decoding one.

    Attributes:
        node: the node that it lives on.
        name: its name there.
        incarnation: which of its lives; 0 in a named reference: the one that lives when the message comes.
    """

    # dict=True lets `bound` keep a node beside the fields: it is neither compared nor sent.
    node: Identity
    name: str
    incarnation: int

    @property
    def label(self) -> str:
        """The reference as errors show it: `name#incarnation on node`."""
        life = f"#{self.incarnation}" if self.incarnation != ANY_LIFE else ""
        return f"{self.name}{life} on {self.node.name}"

    def named(self) -> Reference:
        """Return a reference to whichever life of this name answers on that node; between two lives asks fail."""
        reference = Reference(self.node, self.name, ANY_LIFE)
        node = self.__dict__.get("_node")
        return reference if node is None else reference.bound(node)

    async def ask(self, message: Message[A]) -> A:
        """Send a message and return its answer.

        Raises:
            ActorDied: the actor died, was restarted or its node was lost; it may have seen the message.
            RemoteError: the handler raised; reports its traceback.
            TypeError: no Message, the actor has no handler for it, or it cannot be sent to another process.
            ValueError: asked by the handler that would have to answer.

        Cancellation: a message that waits is taken back; a handler that runs is cancelled, and this ends when it has
        ended (its transfers drained), but after `cancel_deadline_s` of the node at the latest.
        """
        return await self._through().ask(self, message)

    async def tell(self, message: Message[None]) -> None:
        """Send a message and return when it is in the mailbox; waits while that is full.

        An error of the handler ends the actor, since nobody else learns of it.

        Raises:
            ActorDied: the actor died or its node was lost before the message was in.
            TypeError: as in `ask`.

        Cancellation: the message is not delivered. To another process: unless it was in before the cancelling came.
        """
        await self._through().tell(self, message)

    def bound(self, node: Node) -> Reference:
        """Return an equal reference that goes through this node, whichever node the asking task belongs to."""
        reference = Reference(self.node, self.name, self.incarnation)
        reference.__dict__["_node"] = node
        return reference

    def _through(self) -> Node:
        node: Node | None = self.__dict__.get("_node") or current_node.get()
        if node is None:
            raise RuntimeError(f"{self.label} is asked outside of `async with open_node(...)`; no node can carry it")
        return node

    def __repr__(self) -> str:
        return f"<Reference {self.label}>"
