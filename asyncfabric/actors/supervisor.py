"""Supervisor: keeps children alive by a policy; a tree of them decides what a failure costs.

Runs on the event loop's thread. One task per supervisor mends one failure after the other, in the order in which they
happened. Children run in the supervisor's nursery and end before it does (SV-2).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import trio

from asyncfabric.actors.child import SupervisedChild
from asyncfabric.actors.context import inside
from asyncfabric.actors.death import Death, death_from
from asyncfabric.actors.policy import Policy
from asyncfabric.errors import ActorDied, ClosedError

if TYPE_CHECKING:
    from asyncfabric.actors.actor import Actor
    from asyncfabric.actors.node import Node
    from asyncfabric.actors.reference import Reference

logger: logging.Logger = logging.getLogger(__name__)


class Supervisor:
    """Children under one policy; made by `node.supervise` or `supervisor.supervise`, stays valid over restarts.

    When its own supervisor restarts it, all children that have not ended in good order are started again.
    """

    def __init__(self, node: Node, name: str, policy: Policy) -> None:
        """Not for users: use `supervise`."""
        self._node = node
        self._name = name
        self._policy = policy
        self._children: dict[str, SupervisedChild] = {}  # in the order of their first start
        self._failed: deque[SupervisedChild] = deque()
        self._wake = trio.Event()
        self._ready = trio.Event()
        self._mended: deque[float] = deque()  # trio.current_time() of each restart within the policy's window
        self._nursery: trio.Nursery | None = None
        self._because: Death | None = None

    @property
    def name(self) -> str:
        """Full name on the node, empty for the node's own supervisor."""
        return self._name

    @property
    def policy(self) -> Policy:
        """What it does about failures."""
        return self._policy

    @property
    def children(self) -> tuple[str, ...]:
        """Full names of the children, in the order of their first start."""
        return tuple(self._children)

    async def spawn(self, actor: Callable[..., Actor], *arguments: object, name: str) -> Reference:
        """Start an actor as the last child and return its reference, once its `on_start` has ended.

        `actor` is called with the arguments for each life anew. The full name is `<supervisor's name>/<name>`.

        Raises:
            ActorDied: it failed while it started, or this supervisor ended meanwhile; it is not restarted then.
            ClosedError: the supervisor does not run.
            ValueError: the name is taken, empty or holds a `/`.

        Cancellation: the actor is stopped again.
        """
        full_name = self._full_name(name)
        await self._adopt(SupervisedChild(full_name, lambda: self._node.new_life(full_name, lambda: actor(*arguments))))
        return self._node.reference(full_name)

    async def supervise(self, name: str, policy: Policy) -> Supervisor:
        """Start a supervisor as the last child, for a subtree with a policy of its own.

        Raises:
            ClosedError, ValueError: as in `spawn`.

        Cancellation: it is stopped again.
        """
        supervisor = Supervisor(self._node, self._full_name(name), policy)
        await self._adopt(SupervisedChild(supervisor.name, lambda: supervisor))
        return supervisor

    async def stop(self, name: str) -> None:
        """End a child for good and return when nothing of it runs. `name` is as it was spawned; unknown is no error.

        Raises:
            TypeError: no name; of a reference it is `reference.name`.
            ValueError: called from inside of it, so it would wait for itself.

        Cancellation: shielded until the child has ended.
        """
        if not isinstance(name, str):
            raise TypeError(f"stop() takes the name that a child was spawned under, got {type(name).__name__} {name!r}")
        child = self._children.get(f"{self._name}/{name}" if self._name else name)
        await trio.lowlevel.checkpoint()
        if child is None:
            return
        here = inside.get()
        if here is not None and here.node is self._node and f"{here.reference.name}/".startswith(f"{child.name}/"):
            raise ValueError(f"{here.label} stops {child.name} and waits for its own end; Actor.stop() ends an actor")
        await child.stop(Death("it was stopped"))
        self._forget(child)

    async def ready(self) -> None:
        """Return when children can be spawned.

        Cancellation: only this wait ends.
        """
        await self._ready.wait()

    async def run(self, started: Callable[[], None]) -> None:
        """Keep the children alive. Not for users.

        Raises:
            ActorDied: gave up; reports the first cause of the failure that was one too many.

        Cancellation: stops the children, the last first.
        """
        self._mended.clear()
        self._failed.clear()
        self._because = None
        verdict: ActorDied | None = None
        try:
            async with trio.open_nursery() as self._nursery:
                try:
                    self._ready.set()
                    await self._start(list(self._children.values()))
                    started()
                    verdict = await self._mend_until_it_gives_up()
                finally:
                    await self._end(verdict)
        finally:
            self._nursery = None
            self._ready = trio.Event()
        if verdict is not None:
            raise verdict

    def forewarn(self, because: Death) -> None:
        """Notify those who wait for any of the children that they end. Not for users."""
        self._because = because
        for child in self._children.values():
            if child.living is not None and not child.ended.is_set():
                child.living.forewarn(because)

    def forget_children(self) -> None:
        """Free the names of all children. Not for users."""
        for child in list(self._children.values()):
            self._forget(child)

    async def _adopt(self, child: SupervisedChild) -> None:
        if self._nursery is None or self._because is not None:
            raise ClosedError(f"{self._label} does not run, so it starts no {child.name}")
        self._node.register(child)
        self._children[child.name] = child
        child.renew()
        self._nursery.start_soon(child.run, self._child_ended)
        try:
            await child.begun.wait()
        except trio.Cancelled:
            await child.stop(Death("whoever spawned it was cancelled"))
            self._forget(child)
            raise
        if not child.adopted:
            self._forget(child)
            if child.failure is not None:
                raise self._death_of(child, child.failure).error(child.name)
            raise self._ending(Death("it was stopped while it started")).error(child.name)

    async def _start(self, children: Sequence[SupervisedChild]) -> None:
        assert self._nursery is not None
        for child in children:
            if self._children.get(child.name) is not child:
                continue  # it was stopped for good meanwhile
            child.renew()
            self._nursery.start_soon(child.run, self._child_ended)
            await child.begun.wait()
            if child.failure is not None and self._policy.strategy == "rest_for_one":
                return  # it is in line for mending, which starts the rest too

    async def _mend_until_it_gives_up(self) -> ActorDied:
        while True:
            while self._failed:
                child = self._failed.popleft()
                if self._children.get(child.name) is not child:
                    continue  # it was stopped for good meanwhile
                if not self._may_mend():
                    return self._verdict(child)
                self._mended.append(trio.current_time())
                await self._mend(child)
            self._wake = trio.Event()
            await self._wake.wait()

    def _may_mend(self) -> bool:
        while self._mended and trio.current_time() - self._mended[0] >= self._policy.within_s:
            self._mended.popleft()
        return len(self._mended) < self._policy.restarts

    async def _mend(self, child: SupervisedChild) -> None:
        assert child.failure is not None
        death = self._death_of(child, child.failure)
        logger.warning("%s restarts %s: %s", self._label, child.name, death.reason)
        affected = [child]
        if self._policy.strategy == "rest_for_one":
            order = list(self._children.values())
            affected = order[order.index(child) :]
            because = Death(
                f"it depends on {child.name}, which failed: {death.reason}",
                death.origin,
                death.kind,
                death.traceback,
                death.cause,
            )
            for later in reversed(affected[1:]):
                await later.stop(because)
                self._log_casualty(later, death)
            affected = [one for one in affected if one.adopted]  # what was being spawned is for its spawner
            self._failed = deque(one for one in self._failed if one not in affected)
        await self._start(affected)

    async def _end(self, verdict: ActorDied | None) -> None:
        """Stop all children, the last first; raise what failed only now, when nobody else would."""
        pending = self._failed[0] if self._failed and not self._may_mend() else None
        late = self._verdict(pending) if pending is not None else None
        because = self._ending(Death("its supervisor was stopped"))
        if verdict is not None:
            because = Death(str(verdict.args[0]), verdict.origin, verdict.kind, verdict.traceback, verdict.__cause__)
        for child in reversed(list(self._children.values())):
            had_ended = child.ended.is_set()
            await child.stop(because)
            if child.failure is not None and not had_ended and verdict is None and late is None:
                late = None if self._may_mend() else self._verdict(child)
        if late is not None and verdict is None:
            raise late

    def _child_ended(self, child: SupervisedChild) -> None:
        if child.stopping:
            return  # who stops it looks at it
        if child.failure is None:
            self._forget(child)
        elif child.adopted:
            self._failed.append(child)
            self._wake.set()

    def _verdict(self, child: SupervisedChild) -> ActorDied:
        assert child.failure is not None
        death = self._death_of(child, child.failure)
        policy = self._policy
        reason = f"{self._label} gave up"
        if policy.restarts:
            reason += f" after {policy.restarts} restarts in {policy.within_s:g} s"
        error = ActorDied(
            f"{reason}: {child.name} failed: {death.reason}",
            remedy="see the traceback of the first failure; a Policy with restarts heals what is worth trying again",
            actor=child.name,
            origin=death.origin,
            kind=death.kind,
            traceback=death.traceback,
        )
        error.__cause__ = death.cause
        return error

    def _ending(self, otherwise: Death) -> Death:
        return self._because or otherwise

    def _death_of(self, child: SupervisedChild, failure: Exception) -> Death:
        noted: Death | None = getattr(child.living, "death", None) if child.made else None
        return noted or death_from(failure, f"{child.name} on {self._node.identity.name}")

    def _log_casualty(self, child: SupervisedChild, death: Death) -> None:
        if child.failure is not None:
            logger.warning("%s failed too when it was stopped for %s", child.name, death.origin, exc_info=child.failure)

    def _forget(self, child: SupervisedChild) -> None:
        if self._children.get(child.name) is child:
            del self._children[child.name]
            self._node.unregister(child)
            if isinstance(child.living, Supervisor):
                child.living.forget_children()

    def _full_name(self, name: str) -> str:
        if not name or "/" in name:
            raise ValueError(f"a name is not empty and holds no '/', got {name!r}")
        return f"{self._name}/{name}" if self._name else name

    @property
    def _label(self) -> str:
        node = self._node.identity.name
        return f"supervisor {self._name} on {node}" if self._name else f"node {node}"
