"""Node: this process as others see it. One nursery for all its actors; references ask and report through it.

Runs on the event loop's thread. Who restarts whom stands in `supervisor`, what travels in `wire`.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio

from asyncfabric.actors.base_tasks import BaseTasks
from asyncfabric.actors.child import SupervisedChild
from asyncfabric.actors.context import current_node, handling
from asyncfabric.actors.death import Death, first_leaf
from asyncfabric.actors.life import Life
from asyncfabric.actors.link import Identity, Link
from asyncfabric.actors.message import check_message
from asyncfabric.actors.policy import Policy
from asyncfabric.actors.reference import ANY_LIFE, Reference
from asyncfabric.actors.remote import Remote
from asyncfabric.actors.request import ActorRequest
from asyncfabric.actors.supervisor import Supervisor
from asyncfabric.actors.trace import trace_context
from asyncfabric.errors import ActorError, ClosedError, PeerError

if TYPE_CHECKING:
    from asyncfabric.actors.actor import Actor
    from asyncfabric.actors.message import A, Message


class Node:
    """A node of the cluster, made by `async with open_node(name) as node`."""

    def __init__(self, identity: Identity, policy: Policy, cancel_deadline_s: float) -> None:
        """Not for users: use `open_node`."""
        self._identity = identity
        self._cancel_deadline_s = cancel_deadline_s
        self._names: dict[str, SupervisedChild] = {}
        self._lives = 0
        self._root = Supervisor(self, "", policy)
        self._remote: Remote | None = None
        self._closed = False

    @property
    def identity(self) -> Identity:
        """Who this node is: its name, and a random number of this life."""
        return self._identity

    @property
    def supervisor(self) -> Supervisor:
        """The supervisor of what `spawn` and `supervise` start; when it gives up, `open_node` raises."""
        return self._root

    @property
    def actors(self) -> tuple[Reference, ...]:
        """The actors that live on this node now."""
        lives = (child.living for child in self._names.values() if not child.ended.is_set())
        return tuple(life.reference for life in lives if isinstance(life, Life))

    @property
    def protocol_errors(self) -> int:
        """How many frames came that could not be read; each was logged and dropped, or refused when asked by number."""
        return self._remote.protocol_errors if self._remote is not None else 0

    async def spawn(self, actor: Callable[..., Actor], *arguments: object, name: str) -> Reference:
        """Start an actor under the node's own supervisor and return its reference, once its `on_start` has ended.

        Raises and cancellation: as `Supervisor.spawn`.

        Cancellation: the actor is stopped again.
        """
        return await self._root.spawn(actor, *arguments, name=name)

    async def supervise(self, name: str, policy: Policy) -> Supervisor:
        """Start a supervisor, for actors that are restarted together by one policy.

        Raises:
            ValueError: the name is taken, empty or holds a `/`.

        Cancellation: it is stopped again.
        """
        return await self._root.supervise(name, policy)

    async def stop(self, name: str) -> None:
        """End an actor or a supervisor that was started by this node's `spawn` or `supervise`, for good.

        Raises:
            TypeError: no name; of a reference it is `reference.name`.
            ValueError: called from inside of it.

        Cancellation: shielded until it has ended.
        """
        await self._root.stop(name)

    async def lookup(self, identity: Identity, name: str) -> Reference:
        """Return the reference of the present life of an actor, on this node or on another.

        Raises:
            ActorDied: no such actor lives there, or the node is lost or was never connected.

        Cancellation: only this wait ends.
        """
        if identity == self._identity:
            await trio.lowlevel.checkpoint()
            return self.reference(name)
        incarnation = await self._to(identity, f"{name} on {identity.name}").lookup(identity, name)
        return Reference(identity, name, incarnation).bound(self)

    async def ask(self, reference: Reference, message: Message[A]) -> A:
        """Ask; see `Reference.ask`.

        Cancellation: as described there.
        """
        check_message(message)
        if reference.node != self._identity:
            remote = self._to(reference.node, reference.label)
            answer: A = await remote.call(reference, message, asked=True)
            return answer
        life = self.life(reference.name, reference.incarnation)
        if handling.get() is life and life.actor.concurrency == 1:
            raise ValueError(f"{life.label} asks itself and handles one message at a time: it would wait for ever")
        mine: A = await self._ask_here(life, ActorRequest(message, asked=True, trace=trace_context.get()))
        return mine

    async def tell(self, reference: Reference, message: Message[None]) -> None:
        """Send without an answer; see `Reference.tell`.

        Cancellation: as described there.
        """
        check_message(message)
        if reference.node != self._identity:
            await self._to(reference.node, reference.label).call(reference, message, asked=False)
            return
        await trio.lowlevel.checkpoint_if_cancelled()
        request = ActorRequest(message, asked=False, trace=trace_context.get())
        self.life(reference.name, reference.incarnation).enter(request)
        await self._entered(request)

    def life(self, name: str, incarnation: int = ANY_LIFE) -> Life:
        """Return the life that a reference names. Not for users.

        Raises:
            ActorDied: it has ended.
        """
        child = self._names.get(name)
        life = child.living if child is not None else None
        if not isinstance(life, Life):
            label = f"{name}#{incarnation}" if incarnation else name
            raise Death("nothing of that name lives on the node").error(f"{label} on {self._identity.name}")
        if incarnation not in (ANY_LIFE, life.reference.incarnation):
            earlier = Reference(self._identity, name, incarnation).label
            raise life.succeeded.error(earlier)
        if life.mailbox.sealed:
            raise life.refusal()
        return life

    def reference(self, name: str) -> Reference:
        """Return the reference of the present life of an actor of this node.

        Raises:
            ActorDied: no such actor lives here.
        """
        return self.life(name).reference

    def new_life(self, name: str, make: Callable[[], Actor]) -> Life:
        """Return the next life of a name. Not for users."""
        self._lives += 1
        child = self._names.get(name)
        before = child.living if child is not None else None
        return Life(self, name, self._lives, make, before if isinstance(before, Life) else None)

    def register(self, child: SupervisedChild) -> None:
        """Take a name. Not for users. Raises ValueError when it is taken."""
        if child.name in self._names:
            raise ValueError(f"the name {child.name!r} is taken on node {self._identity.name}")
        self._names[child.name] = child

    def unregister(self, child: SupervisedChild) -> None:
        """Free a name. Not for users."""
        if self._names.get(child.name) is child:
            del self._names[child.name]

    async def _ask_here(self, life: Life, request: ActorRequest) -> Any:
        await trio.lowlevel.checkpoint_if_cancelled()
        life.enter(request)
        try:
            return await request.outcome()
        except trio.Cancelled:
            request.cancel()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + self._cancel_deadline_s):
                await request.finished.wait()
            raise

    async def _entered(self, request: ActorRequest) -> None:
        assert request.place is not None
        try:
            await request.place.entered()
        except trio.Cancelled:
            request.place.withdraw()
            raise

    def _to(self, identity: Identity, label: str) -> Remote:
        if self._closed:
            raise ClosedError(f"node {self._identity.name} is closed")
        if self._remote is None:
            error = PeerError(f"node {self._identity.name} was opened without a link to others")
            raise Death(str(error), cause=error).error(label)
        if identity.name == self._identity.name:
            raise Death("it lived in an earlier life of this node").error(label)
        return self._remote

    def __repr__(self) -> str:
        return f"<Node {self._identity.name} {self._identity.incarnation:016x}>"


@asynccontextmanager
async def open_node(
    name: str, link: Link | None = None, *, policy: Policy | None = None, cancel_deadline_s: float = 10.0
) -> AsyncIterator[Node]:
    """Open a node, for the time of an `async with` block; at its end all actors of the node are stopped.

    Args:
        name: the node's name in the cluster; the link's, when there is one.
        link: control connections to other nodes; None for a node of its own.
        policy: what becomes of failed actors of `node.spawn`; by default their failures rise from this context.
        cancel_deadline_s: how long a cancelled ask waits until its handler has ended.

    Raises:
        ActorDied: an actor failed and no supervisor healed it; reports the first cause.
        ValueError: an empty name, or another than the link's.

    Cancellation: stops the actors, those first that were spawned last, and returns when nothing of them runs.
    """
    if not name or (link is not None and link.identity.name != name):
        raise ValueError(f"a node has the name of its link, got {name!r}" + (f" and {link.identity}" if link else ""))
    identity = link.identity if link is not None else Identity(name, secrets.randbits(63) or 1)
    node = Node(identity, policy or Policy(), cancel_deadline_s)
    raised: Exception | None = None
    async with trio.open_nursery() as nursery:
        base = BaseTasks(nursery)
        try:
            # Not nursery.start: a start that is cancelled waits for its task, and these are shielded.
            if link is not None:
                node._remote = remote = Remote(node, link, cancel_deadline_s)
                await base.start(remote.run)
            await base.start(node.supervisor.run)
            token = current_node.set(node)
            try:
                yield node
            finally:
                current_node.reset(token)
        except Exception as error:
            raised = error
        finally:
            await base.aclose()
            node._closed = True
            nursery.cancel_scope.cancel()
    if base.failure is None:
        if raised is not None:
            raise raised
    elif raised is None or _follows(raised, base.failure):
        raise base.failure
    else:
        raise ExceptionGroup(f"node {name} failed, and so did what ran in it", [base.failure, raised])


def _follows(error: Exception, failure: Exception) -> bool:
    first = first_leaf(error)
    return isinstance(first, ActorError) and isinstance(failure, ActorError) and first.origin == failure.origin
