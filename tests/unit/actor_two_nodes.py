"""Two nodes with an actor on the far one, for the tests of actors over links."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import trio
import trio.testing
from actor_cast import Add, Hand
from actor_links import Opener

from asyncfabric.actors import (
    Message,
    Node,
    Policy,
    Reference,
    handles,
    open_node,
    trace_context,
)
from asyncfabric.actors.link import Link


class Relay(Message[int]):
    to: Reference
    a: int
    b: int


class Trace(Message[str | None]):
    """Answered with the trace context of the handler."""


class Local(Message[object]):
    """Answered with what cannot leave the process."""


class FarWorker(Hand):
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
        await far.spawn(FarWorker, log, gate, name="worker")
        worker = await near.lookup(far.identity, "worker")
        yield Two(near, far, near_link, far_link, worker, log, gate)


async def until(log: list[object], entry: object) -> None:
    while entry not in log:
        await trio.testing.wait_all_tasks_blocked(0.001)
