"""IncomingCalls: calls of other nodes to actors of this one; one short task for each waits for its outcome.

Runs on the event loop's thread. A call takes its place in the mailbox before the next frame is read, so that what one
node sends stays in order; a full mailbox makes the calls wait in line, and the sender's window bounds how many.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from asyncfabric.actors import wire
from asyncfabric.actors.death import raised_by
from asyncfabric.actors.link import Identity, Link
from asyncfabric.actors.outgoing import WINDOW
from asyncfabric.actors.request import ActorRequest, Withdrawn
from asyncfabric.errors import ActorDied, ActorError, ClosedError, PeerError

if TYPE_CHECKING:
    from asyncfabric.actors.life import Life
    from asyncfabric.actors.node import Node

logger: logging.Logger = logging.getLogger(__name__)
MAX_CALLS = 65_536  # of one node at a time; a well-behaved one stays below by its windows and our mailboxes
MAX_REPLIES = 1024  # refusals that one node does not read; then it is disconnected


class IncomingCalls:
    """The calls of other nodes."""

    def __init__(self, node: Node, link: Link) -> None:
        self._node = node
        self._link = link
        self._nursery: trio.Nursery | None = None
        self._requests: dict[tuple[Identity, int], ActorRequest] = {}
        self._lines: Counter[tuple[Identity, str]] = Counter()  # calls before a full mailbox
        self._calls: Counter[Identity] = Counter()
        self._replies: Counter[Identity] = Counter()

    def __len__(self) -> int:
        return len(self._requests)

    @contextmanager
    def answering(self, nursery: trio.Nursery) -> Iterator[None]:
        """Answer calls from tasks of this nursery while the context is open."""
        self._nursery = nursery
        try:
            yield
        finally:
            self._nursery = None

    def receive(self, sender: Identity, frame: wire.Call | wire.Lookup | wire.CancelCall, trace: str | None) -> None:
        """Take a call, in the order in which they arrive; answers leave from tasks of their own."""
        if isinstance(frame, wire.CancelCall):
            request = self._requests.get((sender, frame.number))
            if request is None or (not request.asked and request.is_in):
                self.reply(sender, _failed(frame.number, Withdrawn()))
            else:
                request.cancel()
            return
        try:
            if isinstance(frame, wire.Lookup):
                found = self._node.life(frame.actor).reference.incarnation
                self.reply(sender, wire.ActorFound(number=frame.number, incarnation=found))
            else:
                self._enter(sender, frame, trace)
        except (ActorError, TypeError, msgspec.DecodeError, _Refused) as error:
            self.reply(sender, _failed(frame.number, error))

    def lose(self, peer: Identity) -> None:
        """Cancel what a lost node asked for: nobody waits for it."""
        for (sender, _), request in list(self._requests.items()):
            if sender == peer and (request.asked or not request.is_in):
                request.cancel()

    def reply(self, to: Identity, frame: wire.AnyFrame) -> None:
        """Send an answer when there is room; a node that sends and does not read is disconnected."""
        self._replies[to] += 1
        if self._replies[to] == MAX_REPLIES:
            logger.warning("%s reads no answers: it is disconnected", to)
            self._start(self._link.disconnect, to)
        if self._replies[to] < MAX_REPLIES:
            self._start(self._reply, to, frame)
        else:
            _less(self._replies, to)

    def _enter(self, sender: Identity, frame: wire.Call, trace: str | None) -> None:
        if (sender, frame.number) in self._requests:
            raise _Refused(f"call {frame.number} is in progress already")
        line = (sender, frame.actor)
        if self._lines[line] >= WINDOW or self._calls[sender] >= MAX_CALLS:
            raise _Refused(f"more than {WINDOW} calls before one full mailbox, or {MAX_CALLS} in all")
        life = self._node.life(frame.actor, frame.incarnation)
        if not life.accepts(frame.kind):
            known = ", ".join(sorted(life.actor.handlers)) or "nothing"
            raise TypeError(f"{life.label} has no handler for {frame.kind}; it handles {known}")
        message = wire.body_of(frame.body, life.actor.handlers[frame.kind][0])
        request = ActorRequest(message, asked=frame.asked, trace=trace)
        life.enter(request)
        self._requests[sender, frame.number] = request
        self._calls[sender] += 1
        in_line = None if request.is_in else line
        if in_line is not None:
            self._lines[in_line] += 1
        self._start(self._serve, sender, frame.number, request, life, in_line)

    async def _serve(
        self, sender: Identity, number: int, request: ActorRequest, life: Life, in_line: tuple[Identity, str] | None
    ) -> None:
        reply: wire.AnyFrame
        assert request.place is not None
        try:
            try:
                await request.place.entered()
            finally:
                if in_line is not None:
                    _less(self._lines, in_line)
            if request.asked:
                await self._send(sender, wire.Accepted(number=number))
                reply = wire.Answer(number=number, body=_raw(await request.outcome(), life))
            else:
                reply = wire.Accepted(number=number) if request.is_in else _failed(number, Withdrawn())
        except (ActorError, Withdrawn, TypeError) as error:
            reply = _failed(number, error)
        if isinstance(reply, wire.CallFailed) and request.scope.cancel_called:
            await request.finished.wait()  # a confirmed cancellation means that nothing runs any more
        self._requests.pop((sender, number), None)
        _less(self._calls, sender)
        await self._send(sender, reply, life.label)

    def _start(self, function: Callable[..., Awaitable[None]], *arguments: object) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(function, *arguments)

    async def _reply(self, to: Identity, frame: wire.AnyFrame) -> None:
        try:
            await self._send(to, frame)
        finally:
            _less(self._replies, to)

    async def _send(self, to: Identity, frame: wire.AnyFrame, origin: str = "") -> None:
        """Send an answer. One that is larger than the node takes becomes a failure of this reason, with this origin."""
        try:
            try:
                await self._link.send(to, wire.CHANNEL, wire.encoded(frame))
            except ValueError as error:
                reason = f"the answer cannot be sent: {str(error)[:200]}"
                short = wire.CallFailed(
                    number=frame.number, outcome="raised", reason=reason, origin=origin[:200], kind=type(error).__name__
                )
                await self._link.send(to, wire.CHANNEL, wire.encoded(short))
        except (PeerError, ClosedError) as error:
            logger.debug("an answer to %s was not sent: %s", to, error)


class _Refused(Exception):  # becomes an answer, is never raised to users
    """A call against the protocol."""


def _failed(number: int, error: Exception) -> wire.CallFailed:
    if isinstance(error, ActorError):
        outcome: wire.Outcome = "died" if isinstance(error, ActorDied) else "raised"
        return wire.CallFailed(
            number=number,
            outcome=outcome,
            reason=str(error.args[0]),
            origin=error.origin,
            kind=error.kind,
            traceback=error.traceback,
        )
    if isinstance(error, Withdrawn):
        return wire.CallFailed(number=number, outcome="withdrawn", reason="it was cancelled")
    outcome = "refused" if isinstance(error, _Refused) else "unhandled"
    return wire.CallFailed(number=number, outcome=outcome, reason=str(error))


def _raw(value: object, life: Life) -> msgspec.Raw:
    try:
        return msgspec.Raw(wire.encoded(value))
    except TypeError as error:
        raise raised_by(error, life.label) from error


def _less(counts: Counter[Any], key: object) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
