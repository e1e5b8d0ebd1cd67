"""The coordinator's side of a measured process: start it, call it over two pipes, end it.

The coordinator only blocks in reads while something is measured, so that it takes no core from the processes under
test. One JSON object per line each way; a call that the process cannot do comes back as an error with its class name.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal

from asyncfabric_services.exits import CheckFailed, DeadlinePassed, EnvironmentUnfit

BenchWorkerKind = Literal[
    "limits", "fabric", "engine", "scatter", "kv", "ttft", "moe", "moe-gpu", "gpu", "gpu-limits", "weights",
    "gpu-weights", "weights-crowd", "mesh", "nixl", "nixl-bare", "notes",
]  # fmt: skip

UNFIT_ERRORS = frozenset({"DeviceError", "EnvironmentUnfit", "ImportError", "ModuleNotFoundError", "PermissionError"})
"""Errors of a measured process that mean: this machine cannot do it."""


class Process(AbstractContextManager["Process"]):
    """One measured process. Calls block until it answers or the run's deadline passes."""

    def __init__(
        self, kind: BenchWorkerKind, role: str, deadline: float, meeting: int = -1, inherit: Sequence[int] = ()
    ) -> None:
        """Start the process; `deadline` is on time.monotonic(), `meeting` and `inherit` are descriptors it may use."""
        self.role = role
        self._deadline = deadline
        self._buffer = b""
        command = [sys.executable, "-m", "asyncfabric_services.bench.peer", kind, str(meeting)]
        passed = tuple(each for each in (meeting, *inherit) if each >= 0)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=passed)

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def start(self, command: str, **arguments: Any) -> None:
        """Send a call without waiting for its answer; `finish` must follow."""
        assert self._process.stdin is not None
        line = json.dumps({"command": command, "arguments": arguments}).encode() + b"\n"
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def finish(self) -> Any:
        """Return the answer to the oldest call that was started."""
        while not self.answered:
            self.listen([self])
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer = json.loads(line)
        if "error" not in answer:
            return answer["value"]
        text = f"{self.role}: {answer['class']}: {answer['error']}"
        if answer["class"] in UNFIT_ERRORS:
            raise EnvironmentUnfit(text)
        raise CheckFailed(f"{text}\n{answer['traceback']}")

    def call(self, command: str, **arguments: Any) -> Any:
        """Send a call and return its answer."""
        self.start(command, **arguments)
        return self.finish()

    @property
    def answered(self) -> bool:
        """Say whether an answer is there."""
        return b"\n" in self._buffer

    def fileno(self) -> int:
        """Return the descriptor that answers come from."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def listen(self, processes: Sequence[Process]) -> None:
        """Wait until one of some processes says something, and take what they say.

        Raises:
            DeadlinePassed: none of them did before the deadline of the run.
            CheckFailed: one of them is gone.
        """
        remaining = self._deadline - time.monotonic()
        heard = select.select(processes, [], [], remaining)[0] if remaining > 0 else []
        if not heard:
            raise DeadlinePassed(f"the {self.role} process did not answer before the deadline of the run")
        for process in heard:
            block = os.read(process.fileno(), 1 << 20)
            if not block:
                raise process._gone()
            process._buffer += block

    def hang_up(self) -> None:
        """Let the process end by itself, without waiting: several whose ends wait for each other end together."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def _gone(self) -> CheckFailed:
        return CheckFailed(f"the {self.role} process ended with status {self._process.wait()} in the middle of the run")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the process: by closing its pipe when all is well, at once otherwise."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if error is not None:
            self._process.kill()
        self.hang_up()
        try:
            self._process.wait(timeout=max(1.0, min(30.0, self._deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


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
            next(iter(left.values())).listen(list(left.values()))
        for place in ready:
            found[place] = left[place].finish()
    return [found[place] for place in range(len(processes))]


class Pair(AbstractContextManager["Pair"]):
    """An initiator and a target of one kind, joined by two eventfds and a socket that they inherit."""

    def __init__(self, kind: BenchWorkerKind, deadline: float) -> None:
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
