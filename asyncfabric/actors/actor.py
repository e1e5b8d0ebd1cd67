"""Actor: a task with a mailbox and typed handlers; users derive from it.

Runs on the event loop's thread. How a life goes stands in `life`, who restarts it in `supervisor`; here stands only
what the author of an actor writes and calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from asyncfabric.actors.message import Message, kind_of
from asyncfabric.errors import InternalError

if TYPE_CHECKING:
    from asyncfabric.actors.life import Life
    from asyncfabric.actors.node import Node
    from asyncfabric.actors.policy import Policy
    from asyncfabric.actors.reference import Reference

A = TypeVar("A")
Act = TypeVar("Act", bound="Actor")
_HANDLED = "_asyncfabric_handles"


def handles(
    message_type: type[Message[A]],
) -> Callable[[Callable[[Act, Any], Awaitable[A]]], Callable[[Act, Any], Awaitable[A]]]:
    """Make an async method of an Actor the handler of one message type; type checkers compare the answers.

    Raises:
        TypeError: not a message type.
    """
    given: object = message_type
    if not (isinstance(given, type) and issubclass(given, Message)):
        raise TypeError(f"@handles takes a class derived from Message, got {message_type!r}")

    def mark(method: Callable[[Act, Any], Awaitable[A]]) -> Callable[[Act, Any], Awaitable[A]]:
        setattr(method, _HANDLED, message_type)
        return method

    return mark


class Actor:
    """Base of actors: `__init__` takes what the actor needs, methods marked with `@handles(...)` answer messages.

    Messages are handled in the order in which they came, `concurrency` of them at a time. An error of a handler that
    was asked belongs to the asker (RemoteError) and the actor lives on, unless its type is in `fatal`. Any other error
    ends the actor: of a handler of `tell`, of `on_start`, of a task of `start_soon`, of a child that its own
    policy does not restart. Its supervisor makes a new one from the same arguments, or lets the failure rise.

    Attributes:
        mailbox_capacity: messages that wait in the mailbox before senders wait.
        concurrency: messages that are handled at the same time.
        fatal: errors that end the actor even when somebody asked.
        stop_deadline_s: seconds that `on_stop` may take.
        policy: what happens to failed children of the actor, see `spawn`; None lets their failures end the actor.
    """

    mailbox_capacity: ClassVar[int] = 64
    concurrency: ClassVar[int] = 1
    fatal: ClassVar[tuple[type[Exception], ...]] = (InternalError,)
    stop_deadline_s: ClassVar[float] = 5.0
    policy: ClassVar[Policy | None] = None
    handlers: ClassVar[dict[str, tuple[type[Message[Any]], str]]] = {}

    _life: Life | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Collect the handlers. Raises TypeError for two of one name, ValueError for bad sizes."""
        super().__init_subclass__(**options)
        if cls.concurrency < 1 or cls.mailbox_capacity < 1:
            raise ValueError(
                f"{cls.__name__}: concurrency and mailbox_capacity must be >= 1, "
                f"got {cls.concurrency} and {cls.mailbox_capacity}"
            )
        found = dict(cls.handlers)
        own: dict[str, str] = {}
        for name, method in vars(cls).items():
            message_type = getattr(method, _HANDLED, None)
            if message_type is None:
                continue
            kind = kind_of(message_type)
            if kind in own:
                raise TypeError(f"{cls.__name__}.{own[kind]} and .{name} both handle messages named {kind}")
            own[kind] = name
            found[kind] = (message_type, name)
        cls.handlers = found

    async def on_start(self) -> None:
        """Prepare; messages wait in the mailbox meanwhile. An error fails the start.

        Cancellation: the actor is being stopped before it began; `on_stop` follows.
        """

    async def on_stop(self) -> None:
        """Clean up, however the life ended; runs after all tasks of the actor, also when `on_start` failed.

        Cancellation: not cancelled from outside, but when `stop_deadline_s` is over.
        """

    @property
    def node(self) -> Node:
        """The node that the actor lives on. Raises RuntimeError before the life began, as in `__init__`."""
        return self._living().node

    @property
    def reference(self) -> Reference:
        """The reference of this life, to hand to others."""
        return self._living().reference

    def start_soon(self, function: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Run a task beside the handlers; it is cancelled when the actor ends, and its error ends the actor."""
        self._living().start_soon(function, *arguments)

    async def spawn(self, actor: Callable[..., Actor], *arguments: object, name: str) -> Reference:
        """Start a child that lives no longer than this actor; its name is `<this actor's name>/<name>`.

        Raises:
            ActorDied: the child failed while it started.
            ValueError: the name is taken or holds a `/`.

        Cancellation: the child is stopped again.
        """
        supervisor = await self._living().own_supervisor()
        return await supervisor.spawn(actor, *arguments, name=name)

    def stop(self) -> None:
        """End this life when the messages that are in the mailbox were handled; new ones are refused at once."""
        self._living().stop_when_empty()

    def _living(self) -> Life:
        if self._life is None:
            raise RuntimeError(f"this {type(self).__name__} does not live yet: spawn it, and use this from on_start on")
        return self._life
