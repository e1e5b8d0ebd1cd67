"""Two nodes with an actor on the far one, for the tests of actors over links."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import trio
import trio.testing
from actor_links import Opener

from asyncfabric._orchestration.link import Link
from asyncfabric.actors import (
    Actor,
    Message,
    Node,
    Policy,
    Reference,
    handles,
    open_node,
    trace_context,
)
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


class Relay(Message[int]):
    to: Reference
    a: int
    b: int


class Trace(Message[str | None]):
    """Answered with the trace context of the handler."""


class Local(Message[object]):
    """Answered with what cannot leave the process."""


class Worker(Actor):
    mailbox_capacity = 2

    def __init__(self, log: list[object], gate: trio.Event) -> None:
        self.log = log
        self.gate = gate

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

    @handles(Relay)
    async def relay(self, message: Relay) -> int:
        return await message.to.ask(Add(message.a, message.b))

    @handles(Trace)
    async def trace(self, message: Trace) -> str | None:
        return trace_context.get()

    @handles(Local)
    async def local(self, message: Local) -> object:
        return self


@dataclass
class Two:
    near: Node
    far: Node
    near_link: Link
    far_link: Link
    worker: Reference  # lives far, asked from near
    log: list[object]
    gate: trio.Event


@asynccontextmanager
async def two_nodes(opener: Opener, restarts: int = 1) -> AsyncIterator[Two]:
    async with AsyncExitStack() as stack:
        near_link = await stack.enter_async_context(opener("near"))
        far_link = await stack.enter_async_context(opener("far"))
        far = await stack.enter_async_context(open_node("far", far_link, policy=Policy(restarts=restarts)))
        near = await stack.enter_async_context(open_node("near", near_link))
        await near_link.connect(far_link.address)
        log: list[object] = []
        gate = trio.Event()
        await far.spawn(Worker, log, gate, name="worker")
        worker = await near.lookup(far.identity, "worker")
        yield Two(near, far, near_link, far_link, worker, log, gate)


async def until(log: list[object], entry: object) -> None:
    while entry not in log:
        await trio.testing.wait_all_tasks_blocked(0.001)
