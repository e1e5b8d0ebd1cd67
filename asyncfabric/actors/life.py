"""Life: one incarnation of an actor, from its first task to its last; how it ended is kept in `death`.

Runs on the event loop's thread. No task of a life outlives `run` (SV-2): handlers, tasks and children stand in its
nursery. The first failure is noted where it happens (SV-1), and at that moment all who wait for this life are notified.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from asyncfabric.actors.context import current_node, handling, inside
from asyncfabric.actors.death import Death, death_from, raised_by
from asyncfabric.actors.mailbox import EndOfMailbox, Mailbox
from asyncfabric.actors.message import kind_of
from asyncfabric.actors.policy import Policy
from asyncfabric.actors.reference import Reference
from asyncfabric.actors.request import ActorRequest
from asyncfabric.actors.supervisor import Supervisor
from asyncfabric.actors.trace import trace_context
from asyncfabric.errors import ActorDied, ClosedError

if TYPE_CHECKING:
    from asyncfabric.actors.actor import Actor
    from asyncfabric.actors.node import Node


class Life:
    """One incarnation of an actor."""

    def __init__(
        self, node: Node, name: str, incarnation: int, make: Callable[[], Actor], before: Life | None = None
    ) -> None:
        """`before` is the life of the same name that this one follows."""
        self.node: Node = node
        self.actor: Actor = make()
        if not hasattr(self.actor, "on_start") or not hasattr(self.actor, "handlers"):
            raise TypeError(f"spawn takes an Actor class or a function that returns one, got {self.actor!r}")
        self.reference: Reference = Reference(node.identity, name, incarnation).bound(node)
        self.label: str = self.reference.label
        self.mailbox: Mailbox[ActorRequest] = Mailbox(self.actor.mailbox_capacity)
        ended = before.death or before.because if before is not None else None
        reason = f"it was restarted as #{incarnation}" + (f" after: {ended.reason}" if ended else "")
        # What those receive who still hold a reference to an earlier life.
        self.succeeded: Death = replace(ended, reason=reason) if ended is not None else Death(reason)
        if before is not None:
            # Its cause has a traceback, whose frames hold that life, and with it all lives and actors since the first.
            before.succeeded = replace(before.succeeded, cause=None)
        self.death: Death | None = None
        self.because: Death | None = None
        self._running: set[ActorRequest] = set()
        self._nursery: trio.Nursery | None = None
        self._supervisor: Supervisor | None = None

    def accepts(self, kind: str) -> bool:
        """Whether there is a handler for messages of this name."""
        return kind in self.actor.handlers

    def refusal(self) -> ActorDied:
        """Return a new error for who sends to a life that has ended."""
        return (self.death or self.because or Death("it was stopped")).error(self.label)

    def enter(self, request: ActorRequest) -> None:
        """Take a place in the mailbox for a request.

        Raises:
            ActorDied: the life has ended.
            TypeError: there is no handler for such messages.
        """
        kind = kind_of(type(request.message))
        handled = self.actor.handlers.get(kind)
        if handled is None or not isinstance(request.message, handled[0]):
            known = ", ".join(sorted(self.actor.handlers)) or "nothing"
            raise TypeError(f"{self.label} has no handler for {kind}; it handles {known}")
        request.place = self.mailbox.enter(request)

    def start_soon(self, function: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Run a task of the actor; its failure ends the life."""
        if self._nursery is None:
            raise ClosedError(f"{self.label} has ended, so it starts no tasks")
        self._nursery.start_soon(self._beside, function, *arguments)

    async def own_supervisor(self) -> Supervisor:
        """Return the supervisor of the actor's children, started on first use.

        Cancellation: nothing happened, or the supervisor is there and has no children.
        """
        if self._nursery is None:
            raise ClosedError(f"{self.label} has ended, so it spawns no children")
        if self._supervisor is None:
            policy = self.actor.policy or Policy()
            self._supervisor = Supervisor(self.node, self.reference.name, policy)
            self._nursery.start_soon(self._noting, self._supervisor.run, _nothing)
        await self._supervisor.ready()
        return self._supervisor

    def stop_when_empty(self) -> None:
        """Refuse new messages; end when those in the mailbox were handled."""
        self._drop(self.mailbox.seal(self.refusal), self.refusal)

    async def run(self, started: Callable[[], None]) -> None:
        """Live: start, handle messages, stop.

        Raises what failed first; `death` reports it with its origin.

        Cancellation: ends the life; handlers are cancelled, `on_stop` runs.
        """
        actor = self.actor
        actor._life = self
        current_node.set(self.node)  # what `spawn` was called from may be another node, or a request with its trace
        inside.set(self)
        handling.set(None)
        trace_context.set(None)
        try:
            try:
                async with trio.open_nursery() as self._nursery:
                    self._nursery.start_soon(self._noting, self._live, started)
            finally:
                self._nursery = None
                with trio.CancelScope(shield=True, deadline=trio.current_time() + actor.stop_deadline_s) as stopping:
                    await self._noting(actor.on_stop)
                if stopping.cancelled_caught:
                    late = TimeoutError(f"on_stop took more than {actor.stop_deadline_s} s and was cancelled")
                    self._note(late)
                    raise late
        finally:
            if self._supervisor is not None:
                self._supervisor.forget_children()  # their names are free for the children of the next life
            self._end(self.death or self.because or Death("it was stopped"))

    def forewarn(self, because: Death) -> None:
        """Notify all who wait for this life that it ends; its supervisor cancels it then."""
        if self.because is None:
            self.because = because
            self._end(self.death or because)

    async def _live(self, started: Callable[[], None]) -> None:
        await self.actor.on_start()
        started()
        await self._serve()
        assert self._nursery is not None
        self._nursery.cancel_scope.cancel()  # tasks and children live no longer than the actor

    async def _serve(self) -> None:
        places = trio.Semaphore(self.actor.concurrency)
        async with trio.open_nursery() as handling:
            while True:
                await places.acquire()
                try:
                    request = await self.mailbox.take()
                except EndOfMailbox:
                    if self.because is not None:
                        await trio.sleep_forever()  # forewarned: its supervisor ends it when its turn comes
                    return
                self._running.add(request)
                if self.actor.concurrency == 1:
                    await self._handle(request, places)
                else:
                    await handling.start(self._handle, request, places)  # start, so that they begin in order

    async def _handle(
        self,
        request: ActorRequest,
        places: trio.Semaphore,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        task_status.started()
        _, method = self.actor.handlers[kind_of(type(request.message))]
        trace = trace_context.set(request.trace)
        handled = handling.set(self)
        try:
            with request.scope:
                request.answer(await getattr(self.actor, method)(request.message))
        except Exception as error:
            if not request.asked or _is_fatal(error, self.actor.fatal):
                self._note(error)
                raise
            request.fail(raised_by(error, self.label))
        finally:
            trace_context.reset(trace)
            handling.reset(handled)
            self._running.discard(request)
            if self.death is not None or self.because is not None:
                request.fail(self.refusal())
            request.finish()
            places.release()

    async def _beside(self, function: Callable[..., Awaitable[object]], *arguments: object) -> None:
        handling.set(None)  # a handler that started this task does not wait for it
        await self._noting(function, *arguments)

    async def _noting(self, function: Callable[..., Awaitable[object]], *arguments: object) -> None:
        try:
            await function(*arguments)
        except BaseException as error:
            failure = failure_in(error)
            if failure is not None:
                self._note(failure)
            raise

    def _note(self, error: BaseException) -> None:
        if self.death is None:
            self._end(death_from(error, self.label), failed=True)

    def _end(self, death: Death, *, failed: bool = False) -> None:
        if failed:
            self.death = death

        def refusal() -> ActorDied:
            return death.error(self.label)

        self._drop(self.mailbox.seal(refusal), refusal)
        self._drop(self.mailbox.empty(), refusal)
        for request in self._running:
            request.fail(death.error(self.label))

    def _drop(self, requests: list[ActorRequest], refusal: Callable[[], ActorDied]) -> None:
        for request in requests:
            request.fail(refusal())
            request.finish()


def failure_in(error: BaseException) -> BaseException | None:
    """Return what of an error is a failure: cancellation is none, alone or in a group."""
    if isinstance(error, trio.Cancelled | GeneratorExit):
        return None
    if isinstance(error, BaseExceptionGroup):
        return error.split(trio.Cancelled)[1]
    return error


def _is_fatal(error: Exception, fatal: tuple[type[Exception], ...]) -> bool:
    if isinstance(error, ExceptionGroup):
        return error.subgroup(fatal) is not None
    return isinstance(error, fatal)


def _nothing() -> None:
    pass
