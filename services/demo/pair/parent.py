"""The parent: starts prefill and decode as separate processes, introduces them, hands out prompts, collects figures.

It never touches a tensor. Children live in their own process group, so that Ctrl-C reaches the parent alone; when the
parent ends in whatever way their stdin closes and they leave by themselves.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import trio

from asyncfabric_services.demo.line_channel import LineChannel
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
    ToParent,
)
from asyncfabric_services.demo.settings import Job, Settings
from asyncfabric_services.exits import CHECK_FAILED

ROLES = ("prefill", "decode")
LEAVE_SECONDS = 10.0  # after its stdin closed a child drains its transfers; then it is terminated, then killed
GRACE_SECONDS = 1.0  # when one child fails the other often fails of it: wait this long to report the cause, too
STDERR_LINES = 30


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


@dataclass
class Child:
    """One process, and the end of what it wrote to stderr."""

    role: str
    process: trio.Process
    channel: LineChannel
    stderr: deque[str] = field(default_factory=lambda: deque(maxlen=STDERR_LINES))
    finished: bool = False


Inbox = trio.MemoryReceiveChannel[tuple[Child, ToParent | None]]


@dataclass(frozen=True)
class Outcome:
    """All figures, and how many pages were still leased at the end."""

    figures: list[Figures]
    leaked_pages: int


async def run(settings: Settings, jobs: Sequence[Job], view: View) -> Outcome:
    """Run the whole demo; raises DemoError when a child fails or dies.

    Cancellation: both children are told to leave and waited for, with a bound, before this returns.
    """
    sender, inbox = trio.open_memory_channel[tuple[Child, ToParent | None]](64)
    async with trio.open_nursery() as nursery:
        async with _open_children(settings, sender, nursery) as children:
            for child in children:
                await _send(child, Start(settings))
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
    await _send(prefill, Meet(hellos["decode"].address))
    await _send(decode, Meet(hellos["prefill"].address))
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
    leaked, left = 0, len(children)
    while left:
        child, message = await _next(children, inbox)
        if isinstance(message, Goodbye):
            child.finished = True
            leaked += message.leaked_pages
            left -= 1
    return leaked


async def _next(children: Sequence[Child], inbox: Inbox) -> tuple[Child, ToParent]:
    """Return the next message of either child; raises DemoError naming each child that failed or died."""
    reasons: list[str] = []
    status = CHECK_FAILED
    scope = trio.CancelScope()
    with scope:
        while True:
            child, message = await inbox.receive()
            if isinstance(message, Failed):
                reasons.append(f"{child.role} failed: {message.reason}")
                status = message.status
                child.finished = True
            elif message is not None:
                if not reasons:
                    return child, message
            elif not child.finished:
                reasons.append(f"{child.role} died: {_describe(await child.process.wait())}{_tail(child)}")
                child.finished = True
            if reasons:
                scope.deadline = min(scope.deadline, trio.current_time() + GRACE_SECONDS)
                if len(reasons) == len(children):
                    break
    raise DemoError("; ".join(reasons), status)


async def _send(child: Child, message: Start | Meet | Job | Finish) -> None:
    try:
        await child.channel.send(message)
    except trio.BrokenResourceError:
        pass  # it is gone; the end of its stdout says so in the inbox, with the reason


@asynccontextmanager
async def _open_children(
    settings: Settings, sender: trio.MemorySendChannel[tuple[Child, ToParent | None]], nursery: trio.Nursery
) -> AsyncIterator[list[Child]]:
    children: list[Child] = []
    try:
        for role in ROLES:
            process = await trio.lowlevel.open_process(
                [sys.executable, "-m", f"{__package__}.{role}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_environment(settings),
                process_group=0,
            )
            assert process.stdin is not None and process.stdout is not None
            child = Child(role, process, LineChannel(process.stdin, process.stdout, ToParent))
            children.append(child)
            nursery.start_soon(_listen, child, sender)
            nursery.start_soon(_collect_stderr, child)
        yield children
    finally:
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as closing:
                for child in children:
                    closing.start_soon(_close_child, child)


async def _listen(child: Child, sender: trio.MemorySendChannel[tuple[Child, ToParent | None]]) -> None:
    while (message := await child.channel.receive()) is not None:
        await sender.send((child, message))
    await sender.send((child, None))


async def _collect_stderr(child: Child) -> None:
    assert child.process.stderr is not None
    partial = b""
    async for data in child.process.stderr:
        *lines, partial = (partial + data).split(b"\n")
        child.stderr.extend(line.decode(errors="replace") for line in lines)


async def _close_child(child: Child) -> None:
    """Close the child's stdin and see it leave; a child that does not is terminated, then killed."""
    assert child.process.stdin is not None
    await child.process.stdin.aclose()
    for stop in (child.process.terminate, child.process.kill):
        with trio.move_on_after(LEAVE_SECONDS):
            await child.process.wait()
            return
        stop()
    await child.process.wait()


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


def _describe(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _tail(child: Child) -> str:
    return "".join(f"\n    {line}" for line in child.stderr)
