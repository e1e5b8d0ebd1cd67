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

from asyncfabric_services.children.child import ChildDied, ChildProcess
from asyncfabric_services.demo.pair.overlap import Figures, figures
from asyncfabric_services.demo.pair.protocol import (
    Finish,
    Meet,
    PairAnswer,
    PairFailed,
    PairGoodbye,
    PairHello,
    PairProgress,
    Pushed,
    Start,
    ToChild,
    ToParent,
)
from asyncfabric_services.demo.settings import DemoSettings, Job
from asyncfabric_services.exits import CHECK_FAILED

ROLES = ("prefill", "decode")
LEAVE_SECONDS = 10.0  # after its stdin closed a child drains its transfers; then it is terminated, then killed
GRACE_SECONDS = 1.0  # when one child fails the other often fails of it: wait this long to report the cause, too


class DemoError(Exception):
    """A child failed or died; `status` is the exit status of the command."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class PairView(Protocol):
    """Shows what happens."""

    def hello(self, role: str, hello: PairHello) -> None:
        """A child is ready."""

    def progress(self, progress: PairProgress) -> None:
        """A stage of a prompt goes on."""

    def answered(self, figures: Figures) -> None:
        """A prompt is done."""


Inbox = trio.MemoryReceiveChannel[tuple[ChildProcess, ToParent | None]]


@dataclass(frozen=True)
class PairOutcome:
    """All figures, and how many pages were still leased at the end."""

    figures: list[Figures]
    leaked_pages: int


async def run(settings: DemoSettings, jobs: Sequence[Job], view: PairView) -> PairOutcome:
    """Run the whole demo; raises DemoError when a child fails or dies.

    Cancellation: both children are ended, with a bound, before this returns.
    """
    sender, inbox = trio.open_memory_channel[tuple[ChildProcess, ToParent | None]](64)
    async with trio.open_nursery() as nursery:
        async with _open_children(settings, sender, nursery) as children:
            secret = os.urandom(32)
            for child in children:
                await _send(child, Start(settings, secret))
            done = await _conduct(children, inbox, jobs, view)
            leaked = await _finish(children, inbox)
        nursery.cancel_scope.cancel()
    return PairOutcome(done, leaked)


async def _conduct(
    children: Sequence[ChildProcess], inbox: Inbox, jobs: Sequence[Job], view: PairView
) -> list[Figures]:
    hellos: dict[str, PairHello] = {}
    while len(hellos) < len(children):
        child, message = await _next(children, inbox)
        if isinstance(message, PairHello):
            hellos[child.role] = message
            view.hello(child.role, message)
    prefill, decode = children
    await _send(prefill, Meet(hellos["decode"].address, hellos["decode"].layout))
    await _send(decode, Meet(hellos["prefill"].address, hellos["prefill"].layout))
    done: list[Figures] = []
    for job in jobs:
        await _send(decode, job)
        pushed: Pushed | None = None
        answer: PairAnswer | None = None
        while pushed is None or answer is None:
            _, message = await _next(children, inbox)
            if isinstance(message, PairProgress):
                view.progress(message)
            elif isinstance(message, Pushed):
                pushed = message
            elif isinstance(message, PairAnswer):
                answer = message
        done.append(figures(pushed, answer))
        view.answered(done[-1])
    return done


async def _finish(children: Sequence[ChildProcess], inbox: Inbox) -> int:
    for child in children:
        await _send(child, Finish())
    leaked, left = 0, list(children)
    while left:
        child, message = await _next(left, inbox)
        if isinstance(message, PairGoodbye):
            leaked += message.leaked_pages
            left.remove(child)
    return leaked


async def _next(children: Sequence[ChildProcess], inbox: Inbox) -> tuple[ChildProcess, ToParent]:
    """Return the next message of these children; raises DemoError naming each of them that failed or died."""
    reasons: dict[str, str] = {}
    status = CHECK_FAILED
    with trio.CancelScope() as scope:
        while len(reasons) < len(children):
            child, message = await inbox.receive()
            if isinstance(message, PairFailed):
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


async def _send(child: ChildProcess, message: ToChild) -> None:
    try:
        await trio.to_thread.run_sync(child.send, message, abandon_on_cancel=True)
    except ChildDied:
        pass  # the end of its stdout is in the inbox, with the reason


@asynccontextmanager
async def _open_children(
    settings: DemoSettings, sender: trio.MemorySendChannel[tuple[ChildProcess, ToParent | None]], nursery: trio.Nursery
) -> AsyncIterator[list[ChildProcess]]:
    children: list[ChildProcess] = []
    try:
        for role in ROLES:
            children.append(
                ChildProcess(role, f"{__package__}.{role}", receives=ToParent, environment=_environment(settings))
            )
            nursery.start_soon(_receive_from, children[-1], sender)
        yield children
    finally:
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as closing:
                for child in children:
                    closing.start_soon(trio.to_thread.run_sync, child.end, LEAVE_SECONDS)


async def _receive_from(
    child: ChildProcess, sender: trio.MemorySendChannel[tuple[ChildProcess, ToParent | None]]
) -> None:
    while (message := await child.receive()) is not None:
        await sender.send((child, message))
    await sender.send((child, None))


def _environment(settings: DemoSettings) -> dict[str, str]:
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
