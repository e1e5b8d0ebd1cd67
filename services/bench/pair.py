"""The coordinator's side of measured processes: calls with a deadline, in one process, in several or in a pair.

The coordinator only blocks in reads while something is measured, so that it takes no core from the processes under
test. A call that the process cannot do comes back as an error with its class name.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from asyncfabric_services.bench.workers import WORKERS, Failure, Value, WorkerCall
from asyncfabric_services.children.child import ChildDied, ChildProcess, wait_any
from asyncfabric_services.exits import CheckFailed, DeadlinePassed, EnvironmentUnfit

UNFIT_ERRORS = frozenset({"DeviceError", "EnvironmentUnfit", "ImportError", "ModuleNotFoundError", "PermissionError"})
"""Errors of a measured process that mean: this machine cannot do it."""


class Process(AbstractContextManager["Process"]):
    """One measured process. Calls block until it answers or the run's deadline passes."""

    def __init__(self, kind: str, role: str, deadline: float, meeting: int = -1, inherit: Sequence[int] = ()) -> None:
        """Start a process of a kind of WORKERS.

        `deadline` is on time.monotonic(), `meeting` and `inherit` are descriptors that it may use.
        """
        if kind not in WORKERS:
            raise ValueError(f"kind must be one of {sorted(WORKERS)}, got {kind!r}")
        self.role = role
        self._deadline = deadline
        self._reported = False  # what it wrote to stderr is in an error already
        passed = [each for each in (meeting, *inherit) if each >= 0]
        module = f"{__package__}.peer"
        self._child = ChildProcess(role, module, (kind, str(meeting)), receives=Value | Failure, inherit=passed)

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._child.pid

    def start(self, command: str, **arguments: Any) -> None:
        """Send a call without waiting for its answer; `finish` must follow."""
        try:
            self._child.send(WorkerCall(command, arguments))
        except ChildDied:
            raise self._gone() from None

    def finish(self) -> Any:
        """Return the answer to the oldest call that was started."""
        while not self.answered:
            self.wait_with([self])
        answer: Value | Failure = self._child.next_nowait()
        if isinstance(answer, Value):
            return answer.value
        text = f"{self.role}: {answer.kind}: {answer.error}"
        if answer.kind in UNFIT_ERRORS:
            raise EnvironmentUnfit(text)
        raise CheckFailed(f"{text}\n{answer.traceback}")

    def call(self, command: str, **arguments: Any) -> Any:
        """Send a call and return its answer."""
        self.start(command, **arguments)
        return self.finish()

    @property
    def answered(self) -> bool:
        """State whether an answer is there."""
        return self._child.ready

    def wait_with(self, processes: Sequence[Process]) -> None:
        """Wait until one of some processes sends something, and take what they sent.

        Raises:
            DeadlinePassed: none of them did before the deadline of the run.
            CheckFailed: one of them is gone.
        """
        children = {process._child: process for process in processes}
        ready = wait_any(list(children), self._deadline - time.monotonic())
        if not ready:
            raise DeadlinePassed(f"the {self.role} process did not answer before the deadline of the run")
        for child in ready:
            if not child.take():
                raise children[child]._gone()

    def hang_up(self) -> None:
        """Let the process end by itself, without waiting: several whose ends wait for each other end together."""
        self._child.hang_up()

    def _gone(self) -> CheckFailed:
        self._reported = True
        return CheckFailed(f"the {self.role} process ended in the middle of the run: {self._child.death()}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the process: by closing its pipe when all is well, at once otherwise; show what it wrote to stderr."""
        if error is not None:
            self._child.kill()
        written = self._child.end(max(1.0, min(30.0, self._deadline - time.monotonic())))
        if not self._reported:
            sys.stderr.write(written)


def all_of(processes: Sequence[Process], command: str, **arguments: Any) -> list[Any]:
    """Make the same call in all processes at once; returns their answers."""
    for process in processes:
        process.start(command, **arguments)
    return answers_of(processes)


def answers_of(processes: Sequence[Process]) -> list[Any]:
    """Return the answers of all processes, each to a call that was started.

    The first error is raised when it comes, and so is the end of a process: others may wait for that one for ever.
    """
    found: dict[int, Any] = {}
    while len(found) < len(processes):
        left = {place: process for place, process in enumerate(processes) if place not in found}
        ready = [place for place, process in left.items() if process.answered]
        if not ready:
            next(iter(left.values())).wait_with(list(left.values()))
        for place in ready:
            found[place] = left[place].finish()
    return [found[place] for place in range(len(processes))]


class BenchPair(AbstractContextManager["BenchPair"]):
    """An initiator and a target of one kind, joined by two eventfds and a socket that they inherit."""

    def __init__(self, kind: str, deadline: float) -> None:
        """Start both processes."""
        self.forth = os.eventfd(0)
        self.back = os.eventfd(0)
        ours, theirs = socket.socketpair()
        eventfds = (self.forth, self.back)
        with ours, theirs:
            self.initiator = Process(kind, f"{kind} initiator", deadline, ours.fileno(), eventfds)
            self.target = Process(kind, f"{kind} target", deadline, theirs.fileno(), eventfds)

    def both(self, command: str, **arguments: Any) -> tuple[Any, Any]:
        """Make the same call in both processes at once."""
        initiator, target = all_of((self.initiator, self.target), command, **arguments)
        return initiator, target

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End both processes."""
        try:
            self.initiator.__exit__(kind, error, traceback)
        finally:
            self.target.__exit__(kind, error, traceback)
            os.close(self.forth)
            os.close(self.back)
