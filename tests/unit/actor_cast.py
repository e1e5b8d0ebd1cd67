"""Messages and an actor for the tests of actors in one process."""

from __future__ import annotations

import trio
import trio.testing

from asyncfabric.actors import Actor, Message, Reference, handles
from asyncfabric.errors import InternalError


class Add(Message[int]):
    a: int
    b: int


class Fail(Message[None]):
    text: str


class Break(Message[None]):
    """Ends the actor, also when asked."""


class Wait(Message[str]):
    """Answered when the gate opens."""


class Note(Message[None]):
    number: int


class Who(Message[Reference]):
    """Answered with the actor's own reference."""


class AskOther(Message[int]):
    other: Reference


class Hand(Actor):
    mailbox_capacity = 2

    def __init__(self, log: list[object] | None = None, gate: trio.Event | None = None) -> None:
        self.log = log if log is not None else []
        self.gate = trio.Event() if gate is None else gate

    @handles(Add)
    async def add(self, message: Add) -> int:
        return message.a + message.b

    @handles(Fail)
    async def fail(self, message: Fail) -> None:
        raise LookupError(message.text)

    @handles(Break)
    async def break_(self, message: Break) -> None:
        raise InternalError("broken on demand")

    @handles(Wait)
    async def wait(self, message: Wait) -> str:
        self.log.append("waiting")
        try:
            await self.gate.wait()
        except trio.Cancelled:
            self.log.append("cancelled")
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()
            self.log.append("drained")
            raise
        return "open"

    @handles(Note)
    async def note(self, message: Note) -> None:
        self.log.append(message.number)


class Worker(Hand):
    """Reports its log when it starts and stops."""

    async def on_start(self) -> None:
        self.log.append("start")

    async def on_stop(self) -> None:
        self.log.append("stop")

    @handles(Who)
    async def who(self, message: Who) -> Reference:
        return self.reference

    @handles(AskOther)
    async def ask_other(self, message: AskOther) -> int:
        return await message.other.ask(Add(1, 2))
