"""ActorRequest: one message on its way through an actor, with the scope that cancelling it cancels.

Runs on the event loop's thread. It is settled once (answered, failed, cancelled) and finished once: when its handler
has ended or will never begin. The two differ when an actor dies while the handler still drains its transfers: askers
learn of the death at once, but who cancels waits until nothing runs for him any more.
"""

from __future__ import annotations

from typing import Any

import trio

from asyncfabric.actors.mailbox import MailboxPlace
from asyncfabric.actors.message import Message


class Withdrawn(Exception):  # an outcome: nobody waits for it
    """The request was cancelled before it had an answer."""


class ActorRequest:
    """A message with what is known about its handling."""

    __slots__ = ("_error", "_settled", "_value", "asked", "finished", "message", "place", "scope", "trace")

    def __init__(self, message: Message[Any], *, asked: bool, trace: str | None = None) -> None:
        """`asked` states whether somebody waits for the answer."""
        self.message: Message[Any] = message
        self.asked: bool = asked
        self.trace: str | None = trace
        self.scope: trio.CancelScope = trio.CancelScope()
        self.finished: trio.Event = trio.Event()
        self.place: MailboxPlace[ActorRequest] | None = None
        self._settled = trio.Event()
        self._value: Any = None
        self._error: Exception | None = None

    @property
    def settled(self) -> bool:
        """Whether the outcome is known."""
        return self._settled.is_set()

    @property
    def is_in(self) -> bool:
        """Whether the message is in the mailbox, or was taken out of it by the actor."""
        return self.place is not None and self.place.where in ("box", "taken")

    def answer(self, value: object) -> None:
        """Settle with an answer, unless it is settled."""
        if not self.settled:
            self._value = value
            self._settled.set()

    def fail(self, error: Exception) -> None:
        """Settle with an error, unless it is settled."""
        if not self.settled:
            self._error = error
            self._settled.set()

    def finish(self) -> None:
        """Announce that nothing runs for this request any more."""
        self.fail(Withdrawn())
        self.finished.set()

    def cancel(self) -> None:
        """Take the message back, or cancel its handler; `finished` reports when that is done."""
        if self.place is not None and self.place.withdraw():
            self.finish()
        else:
            self.scope.cancel()

    async def outcome(self) -> Any:
        """Return the answer, or raise what the asker shall get.

        Cancellation: only this wait ends; `cancel()` ends the handling.
        """
        await self._settled.wait()
        if self._error is not None:
            raise self._error
        return self._value
