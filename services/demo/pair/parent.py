"""The parent: starts prefill and decode as separate processes, introduces them, hands out prompts, collects figures.

It never touches a tensor. In whatever way the parent ends, its children's stdin closes and they leave by themselves.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import trio

from asyncfabric_services.children.child import Child, ChildDied
from asyncfabric_services.demo.pair.overlap import Figures, figures
from asyncfabric_services.demo.pair.protocol import (
    Answer,
    Failed,
    Finish,
    Goodbye,
    Hello,
    Meet,
    Progress,
    Pushed,
    Start,
    ToChild,
    ToParent,
)
from asyncfabric_services.demo.settings import Job, Settings
from asyncfabric_services.exits import CHECK_FAILED

ROLES = ("prefill", "decode")
LEAVE_SECONDS = 10.0  # after its stdin closed a child drains its transfers; then it is terminated, then killed
GRACE_SECONDS = 1.0  # when one child fails the other often fails of it: wait this long to report the cause, too


class DemoError(Exception):
    """A child failed or died; `status` is the exit status of the command."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class View(Protocol):
    """Shows what happens."""

    def hello(self, role: str, hello: Hello) -> None:
        """A child is ready."""

    def progress(self, progress: Progress) -> None:
        """A stage of a prompt goes on."""

    def answered(self, figures: Figures) -> None:
        """A prompt is done."""


Inbox = trio.MemoryReceiveChannel[tuple[Child, ToParent | None]]


@dataclass(frozen=True)
class Outcome:
    """All figures, and how many pages were still leased at the end."""

    figures: list[Figures]
    leaked_pages: int


async def run(settings: Settings, jobs: Sequence[Job], view: View) -> Outcome:
    """Run the whole demo; raises DemoError when a child fails or dies.

    Cancellation: both children are ended, with a bound, before this returns.
    """
    sender, inbox = trio.open_memory_channel[tuple[Child, ToParent | None]](64)
    async with trio.open_nursery() as nursery:
        async with _open_children(settings, sender, nursery) as children:
            secret = os.urandom(32)
            for child in children:
                await _send(child, Start(settings, secret))
            done = await _conduct(children, inbox, jobs, view)
            leaked = await _finish(children, inbox)
        nursery.cancel_scope.cancel()
    return Outcome(done, leaked)


async def _conduct(children: Sequence[Child], inbox: Inbox, jobs: Sequence[Job], view: View) -> list[Figures]:
    hellos: dict[str, Hello] = {}
    while len(hellos) < len(children):
        child, message = await _next(children, inbox)
        if isinstance(message, Hello):
            hellos[child.role] = message
            view.hello(child.role, message)
    prefill, decode = children
    await _send(prefill, Meet(hellos["decode"].address, hellos["decode"].layout))
    await _send(decode, Meet(hellos["prefill"].address, hellos["prefill"].layout))
    done: list[Figures] = []
    for job in jobs:
        await _send(decode, job)
        pushed: Pushed | None = None
        answer: Answer | None = None
        while pushed is None or answer is None:
            _, message = await _next(children, inbox)
            if isinstance(message, Progress):
                view.progress(message)
            elif isinstance(message, Pushed):
                pushed = message
            elif isinstance(message, Answer):
                answer = message
        done.append(figures(pushed, answer))
        view.answered(done[-1])
    return done


async def _finish(children: Sequence[Child], inbox: Inbox) -> int:
    for child in children:
        await _send(child, Finish())
    leaked, left = 0, list(children)
    while left:
        child, message = await _next(left, inbox)
        if isinstance(message, Goodbye):
            leaked += message.leaked_pages
            left.remove(child)
    return leaked


async def _next(children: Sequence[Child], inbox: Inbox) -> tuple[Child, ToParent]:
    """Return the next message of these children; raises DemoError naming each of them that failed or died."""
    reasons: dict[str, str] = {}
    status = CHECK_FAILED
    with trio.CancelScope() as scope:
        while len(reasons) < len(children):
            child, message = await inbox.receive()
            if isinstance(message, Failed):
                reasons[child.role] = f"{child.role} failed: {message.reason}"
                status = message.status
            elif child not in children:
                continue  # it has sent goodbye, and leaves
            elif message is None:
                death = await trio.to_thread.run_sync(child.death, abandon_on_cancel=True)
                reasons.setdefault(child.role, f"{child.role} died: {death}")
            elif not reasons:
                return child, message
            if reasons:
                scope.deadline = min(scope.deadline, trio.current_time() + GRACE_SECONDS)
    raise DemoError("; ".join(reasons.values()), status)


async def _send(child: Child, message: ToChild) -> None:
    try:
        await trio.to_thread.run_sync(child.send, message, abandon_on_cancel=True)
    except ChildDied:
        pass  # the end of its stdout is in the inbox, with the reason


@asynccontextmanager
async def _open_children(
    settings: Settings, sender: trio.MemorySendChannel[tuple[Child, ToParent | None]], nursery: trio.Nursery
) -> AsyncIterator[list[Child]]:
    children: list[Child] = []
    try:
        for role in ROLES:
            children.append(Child(role, f"{__package__}.{role}", receives=ToParent, environment=_environment(settings)))
            nursery.start_soon(_receive_from, children[-1], sender)
        yield children
    finally:
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as closing:
                for child in children:
                    closing.start_soon(trio.to_thread.run_sync, child.end, LEAVE_SECONDS)


async def _receive_from(child: Child, sender: trio.MemorySendChannel[tuple[Child, ToParent | None]]) -> None:
    while (message := await child.receive()) is not None:
        await sender.send((child, message))
    await sender.send((child, None))


def _environment(settings: Settings) -> dict[str, str]:
    """Return the children's environment: no look-ups over the network, and thread counts that hold for every thread.

    torch.set_num_threads alone is not enough: OpenMP keeps the number per calling thread, and forwards run on workers.
    """
    threads = str(settings.threads)
    return {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
