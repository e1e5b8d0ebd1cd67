"""Death: why an actor ended, reported by its first cause (SV-1), and the errors that askers get for it.

Pure; no I/O. An actor that fails because another one did hands on the other's origin, so that the end of a chain names
its beginning.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from asyncfabric.errors import ActorDied, ActorError, FabricError, RemoteError

LONGEST_TRACEBACK = 16 * 1024  # characters


@dataclass(frozen=True, slots=True)
class Death:
    """Why an actor ended.

    Attributes:
        reason: in words, following "the actor died: ".
        origin: whose code failed first, as `name#incarnation on node`; empty when nothing failed.
        kind: type name of the first failure; empty when nothing failed.
        traceback: its text.
        cause: the first failure itself, when it was raised in this process.
    """

    reason: str
    origin: str = ""
    kind: str = ""
    traceback: str = ""
    cause: BaseException | None = None

    def error(self, actor: str) -> ActorDied:
        """Return a new error for somebody who asked this actor."""
        error = died(f"{actor} died: {self.reason}", actor, self.origin, self.kind, self.traceback)
        error.__cause__ = self.cause
        return error


def died(words: str, actor: str, origin: str, kind: str, text: str) -> ActorDied:
    """Return what an asker of a dead actor gets, from its parts."""
    remedy = "its supervisor may have restarted it: look it up again; it may have seen the message"
    return ActorDied(words, remedy=remedy, actor=actor, origin=origin, kind=kind, traceback=text)


def death_from(error: BaseException, here: str) -> Death:
    """Return the death that a failure in the code of `here` is, attributed to its first cause."""
    first = first_leaf(error)
    earlier = earlier_failure(first)
    if earlier is not None:
        words = f"{type(first).__name__}: {first_line(first)}"
        return Death(words, earlier.origin, earlier.kind, earlier.traceback, root_of(earlier))
    words = f"{type(first).__name__}: {first_line(first)}" if first_line(first) else type(first).__name__
    return Death(words, here, type(first).__qualname__, text_of(first), first)


def raised_by(error: BaseException, actor: str) -> RemoteError:
    """Return what an asker gets for an error of the handler."""
    death = death_from(error, actor)
    words = f"{actor} raised {death.reason}"
    remote = RemoteError(words, actor=actor, origin=death.origin, kind=death.kind, traceback=death.traceback)
    remote.__cause__ = death.cause
    return remote


def first_leaf(error: BaseException) -> BaseException:
    """Return the error that came first: nurseries list errors in the order in which their tasks failed."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def earlier_failure(error: BaseException | None) -> ActorError | None:
    """Return the failure of another actor that this error was raised from, None when it began here."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, ActorError) and error.origin:
            return error
        error = error.__cause__
    return None


def root_of(error: BaseException) -> BaseException:
    """Return the error at the beginning of a chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    text = str(error.args[0]) if isinstance(error, FabricError) else str(error)  # without the remedy
    return text.splitlines()[0] if text else ""


def text_of(error: BaseException) -> str:
    """Return the traceback of an error as text, its last part when it is long: it has to fit into a frame."""
    return "".join(traceback.format_exception(error))[-LONGEST_TRACEBACK:]
