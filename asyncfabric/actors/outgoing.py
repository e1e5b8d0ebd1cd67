"""OutgoingCalls: calls of this node's tasks to actors on other nodes, from the frame that leaves to its answer.

Runs on the event loop's thread. Nothing here knows handlers; the other half is `incoming`.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import trio

from asyncfabric.actors import wire
from asyncfabric.actors.death import Death, died
from asyncfabric.actors.link import Identity, Link
from asyncfabric.actors.message import Message, answer_type, kind_of
from asyncfabric.actors.reference import Reference
from asyncfabric.actors.trace import trace_context
from asyncfabric.errors import ClosedError, LocalProtocolError, PeerError, RemoteError, RemoteProtocolError

logger: logging.Logger = logging.getLogger(__name__)
WINDOW = 64  # calls of one node to one actor that are not in its mailbox yet; the receiver refuses more


class _Pending:
    """A call that waits for its answer."""

    __slots__ = ("accepted", "failure", "frame", "label", "peer", "settled")

    def __init__(self, peer: Identity, label: str) -> None:
        self.peer = peer
        self.label = label
        self.accepted = trio.Event()
        self.settled = trio.Event()
        self.frame: wire.Answer | wire.ActorFound | None = None
        self.failure: wire.CallFailed | Exception | None = None

    def settle(self) -> None:
        self.accepted.set()
        self.settled.set()


class OutgoingCalls:
    """The calls of one node."""

    def __init__(self, link: Link, cancel_deadline_s: float) -> None:
        self._link = link
        self._cancel_deadline_s = cancel_deadline_s
        self._pending: dict[int, _Pending] = {}
        self._windows: dict[Reference, tuple[trio.Semaphore, int]] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._pending)

    async def call(self, to: Reference, message: Message[Any], *, asked: bool) -> Any:
        """Send to an actor on another node, with or without an answer.

        Raises what `Reference.ask` raises.

        Cancellation: cancels the call on the other node and waits until nothing runs for it, bounded.
        """
        kind = kind_of(type(message))
        number = self._next()
        frame = wire.Call(
            number=number,
            actor=to.name,
            incarnation=to.incarnation,
            kind=kind,
            body=_raw(message),
            asked=asked,
        )
        pending = _Pending(to.node, to.label)
        window = self._enter_window(to)
        try:
            async with window:
                await self._send(pending, frame)
                await self._or_cancel(pending, number, pending.accepted)
            if asked:
                await self._or_cancel(pending, number, pending.settled)
        finally:
            self._pending.pop(number, None)
            self._leave_window(to)
        return self._result(pending, answer_type(type(message)) if asked else None)

    async def lookup(self, node: Identity, name: str) -> int:
        """Return the incarnation of an actor on another node.

        Raises:
            ActorDied: there is none, or its node is lost.

        Cancellation: only this wait ends.
        """
        number = self._next()
        pending = _Pending(node, f"{name} on {node.name}")
        try:
            await self._send(pending, wire.Lookup(number=number, actor=name))
            await pending.settled.wait()
        finally:
            self._pending.pop(number, None)
        found: int = self._result(pending, None)
        return found

    def receive(self, sender: Identity, frame: wire.Accepted | wire.Answer | wire.ActorFound | wire.CallFailed) -> None:
        """Take what another node states about a call; what nobody waits for any more is dropped."""
        pending = self._pending.get(frame.number)
        if pending is None or pending.peer != sender:
            return
        if isinstance(frame, wire.Accepted):
            pending.accepted.set()
            return
        if isinstance(frame, wire.CallFailed):
            pending.failure = pending.failure or frame
        else:
            pending.frame = frame
        pending.settle()

    def lose(self, peer: Identity, reason: str) -> None:
        """Fail every call to a lost node."""
        for pending in self._pending.values():
            if pending.peer == peer and not pending.settled.is_set():
                pending.failure = PeerError(f"node {peer.name} was lost: {reason}")
                pending.settle()

    def lose_all(self, reason: str) -> None:
        """Fail every call: nothing will arrive any more."""
        for peer in {pending.peer for pending in self._pending.values()}:
            self.lose(peer, reason)

    async def _send(self, pending: _Pending, frame: wire.Call | wire.Lookup) -> None:
        self._pending[frame.number] = pending
        try:
            await self._link.send(pending.peer, wire.CHANNEL, wire.encoded(frame), trace_context.get())
        except (PeerError, ClosedError) as error:
            pending.failure = error
            pending.settle()

    async def _or_cancel(self, pending: _Pending, number: int, until: trio.Event) -> None:
        try:
            await until.wait()
        except trio.Cancelled:
            await self._cancel(pending, number)
            raise

    async def _cancel(self, pending: _Pending, number: int) -> None:
        """Cancel on the other node and wait until it confirms that nothing runs there for this call."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + self._cancel_deadline_s) as scope:
            try:
                await self._link.send(pending.peer, wire.CHANNEL, wire.encoded(wire.CancelCall(number=number)))
                await pending.settled.wait()
            except (PeerError, ClosedError):
                return  # a lost node cancels what we asked for
        if scope.cancelled_caught:
            logger.warning("%s did not confirm a cancelled call in %g s", pending.label, self._cancel_deadline_s)

    def _result(self, pending: _Pending, wanted: Any) -> Any:
        failure = pending.failure
        if isinstance(failure, Exception):
            raise Death(str(failure), pending.label, type(failure).__name__, cause=failure).error(pending.label)
        if failure is not None:
            raise _failure(failure, pending.label)
        if isinstance(pending.frame, wire.ActorFound):
            return pending.frame.incarnation
        if pending.frame is None:
            return None
        try:
            return wire.body_of(pending.frame.body, wanted)
        except msgspec.DecodeError as error:
            raise RemoteProtocolError(
                f"{pending.label} answered with something else than {wanted}: {error}",
                remedy="compare the versions of the program on both nodes",
            ) from None

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _enter_window(self, to: Reference) -> trio.Semaphore:
        window, users = self._windows.get(to, (trio.Semaphore(WINDOW), 0))
        self._windows[to] = (window, users + 1)
        return window

    def _leave_window(self, to: Reference) -> None:
        window, users = self._windows.pop(to)
        if users > 1:
            self._windows[to] = (window, users - 1)


def _raw(message: Message[Any]) -> msgspec.Raw:
    """Return a message as bytes of a frame. Raises TypeError for what cannot leave the process."""
    try:
        return msgspec.Raw(wire.encoded(message))
    except TypeError as error:
        raise TypeError(f"{kind_of(type(message))} cannot be sent to another process: {error}") from None


def _failure(failed: wire.CallFailed, actor: str) -> Exception:
    if failed.outcome == "raised":
        return RemoteError(
            failed.reason, actor=actor, origin=failed.origin, kind=failed.kind, traceback=failed.traceback
        )
    if failed.outcome == "unhandled":
        return TypeError(failed.reason)
    if failed.outcome == "refused":
        return LocalProtocolError(f"{actor} refused the call: {failed.reason}")
    return died(failed.reason, actor, failed.origin, failed.kind, failed.traceback)
